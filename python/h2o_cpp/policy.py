"""Policies: what a cache keeps."""

from h2o_cpp.budget.policy import POLICIES, Policy

__all__ = ["POLICIES", "Policy"]
