"""Policies at budgets, to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from h2o_cpp import _core
from h2o_cpp.model.arguments import KvDType
from h2o_cpp.model.cache_memory import ModelShape, fit_cache
from h2o_cpp.model.policy import Policy, fraction_of, named_policy


class Budgeted(NamedTuple):
    """A policy at a budget."""

    name: str
    budget: float  # fraction of n_ctx
    kept: int  # tokens per layer and KV head
    policy: Policy
    kv_dtype: KvDType = "f16"


def at_budgets(
    names: Sequence[str], budgets: Sequence[float], n_ctx: int, kv_dtype: KvDType = "f16"
) -> list[Budgeted]:
    """The named policies at every budget (fractions of n_ctx), ordered by budget.

    Raises ValueError for unknown names, and for budgets that keep no token or more than all.
    """
    found = []
    for budget in budgets:
        if not 0 < budget <= 1:
            raise ValueError(f"budget={budget}, expected a fraction above 0 and up to 1")
        kept = fraction_of(n_ctx, budget)
        if kept == 0:
            raise ValueError(
                f"budget={budget} keeps 0 of n_ctx={n_ctx} tokens, expected at least 1"
            )
        found += [Budgeted(n, budget, kept, named_policy(n, kept), kv_dtype) for n in names]
    return found


def budgeted(
    names: Sequence[str],
    budgets: Sequence[float],
    model: _core.Model,
    n_ctx: int,
    kv_dtype: KvDType | None,
    *,
    equal_bytes: bool,
) -> list[Budgeted]:
    """The full cache, then the named policies at every budget, as at_budgets().

    kv_dtype: default: f16.
    equal_bytes: budgets are fractions of the bytes of a full cache, which is in f16; policies keep
        as many tokens as fit, and kv_dtype defaults as with cache_memory of Generator.

    Raises ValueError as Generator does.
    """
    full_types = "f16" if equal_bytes or kv_dtype is None else kv_dtype
    found = [Budgeted("full", 1.0, n_ctx, Policy.full(), full_types)]
    if not equal_bytes:
        return found + at_budgets(names, budgets, n_ctx, full_types)
    shape = ModelShape.of(model)
    for share in budgets:
        for name in names:
            policy, types = fit_cache(
                shape, share, name, n_ctx=n_ctx, kv_dtype=kv_dtype, positions="auto"
            )
            kept = n_ctx if policy.budget is None else policy.budget
            found.append(Budgeted(name, share, kept, policy, types))
    return found
