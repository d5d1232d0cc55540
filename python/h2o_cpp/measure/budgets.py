"""Policies at budgets, to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from h2o_cpp import _core
from h2o_cpp.arguments import KvDType
from h2o_cpp.budget.cache_memory import ModelShape, fit_cache
from h2o_cpp.budget.policy import Policy, fraction_of, named_policy
from h2o_cpp.options import CacheOptions, make_options


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


@dataclass(frozen=True)
class Comparison:
    """The full cache, and named policies at budgets."""

    policies: Sequence[str]
    budgets: Sequence[float]
    equal_bytes: bool
    cache: CacheOptions  # what all have in common

    @staticmethod
    def of(
        policies: Sequence[str],
        budgets: Sequence[float],
        *,
        equal_bytes: bool = False,
        **cache: Any,
    ) -> Comparison:
        """Makes one whose caches have the options `cache`, as for Generator, in common.

        budgets: fractions of n_ctx.
        equal_bytes: budgets are fractions of a full f16 cache's bytes, in kv_dtype or in types
            chosen as by cache_memory; the full cache is in f16.

        Raises as Generator does for the options of the caches.
        """
        return Comparison(policies, budgets, equal_bytes, make_options(CacheOptions, cache))

    def caches(self, model: _core.Model) -> list[Budgeted]:
        """The full cache, then the named policies at every budget, as at_budgets().

        Raises ValueError as Generator does.
        """
        n_ctx = self.cache.context
        full_types = "f16" if self.equal_bytes else self.cache.types
        found = [Budgeted("full", 1.0, n_ctx, Policy.full(), full_types)]
        if not self.equal_bytes:
            return found + at_budgets(self.policies, self.budgets, n_ctx, full_types)
        shape = ModelShape.of(model)
        for share in self.budgets:
            for name in self.policies:
                policy, types = fit_cache(
                    shape, share, name, n_ctx=n_ctx, kv_dtype=self.cache.kv_dtype, positions="auto"
                )
                kept = n_ctx if policy.budget is None else policy.budget
                found.append(Budgeted(name, share, kept, policy, types))
        return found

    def session(self, model: _core.Model, one: Budgeted) -> _core.Session:
        """Empty sequences with a cache. Raises ValueError, MemoryError and OSError."""
        cache = replace(self.cache, policy=one.policy, kv_dtype=one.kv_dtype)
        return _core.Session(model, cache.core())
