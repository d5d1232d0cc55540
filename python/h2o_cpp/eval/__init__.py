"""Benchmarks with lm-evaluation-harness (lm_eval), which the extra `eval` installs.

`budgeted` computes likelihoods and outputs, `model` is the model for lm_eval, `tasks` loads tasks
from local files, `scores` runs them. `reasoning` needs nothing but this package: problems with long
traces, made at random.
"""
