"""Benchmarks through lm-evaluation-harness (lm_eval), which the extra `eval` installs.

`budgeted` answers its kinds of requests, `model` is that as lm_eval knows models, `tasks` has its
tasks on local files, `scores` runs them.
"""
