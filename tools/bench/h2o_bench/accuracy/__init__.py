"""Accuracy on tasks against the budget of the cache, as figure 4 of the H2O paper has it."""
