"""The observations that H2O rests on (arXiv 2306.14048, section 3), on any model and text."""
