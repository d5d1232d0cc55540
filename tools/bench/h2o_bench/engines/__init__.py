"""Engines to measure, one module for each, run as processes that speak JSON lines (`serving`)."""
