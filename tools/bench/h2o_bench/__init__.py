"""Benchmarks: this engine and baselines, their measurements and reports."""
