"""The observations behind H2O (arXiv 2306.14048, section 3), for any model and text."""
