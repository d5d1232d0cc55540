"""Accuracy on tasks against the cache budget, as in figure 4 of the H2O paper."""
