"""Measurements of models, caches and the machine."""
