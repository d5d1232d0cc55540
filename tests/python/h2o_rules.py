"""The rules of H2O in numpy, stated for reading, not for speed: what the tests hold the core to.

One sequence, one layer. Float64. Written from the paper and its semantics; it shares nothing with
the core.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import Policy

Array = NDArray[np.float64]


@dataclass
class Kept:
    """A token in the cache of one KV head."""

    position: int
    k: Array
    v: Array
    score: float = 0.0


@dataclass
class ReferenceCache:
    """Feed chunks; see what is kept. `margin` is the smallest gap that decided an eviction."""

    n_heads: int
    n_kv_heads: int
    policy: Policy
    seen: int = 0
    margin: float = np.inf
    heads: list[list[Kept]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.heads = [[] for _ in range(self.n_kv_heads)]

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        """q [n, n_heads, d], k and v [n, n_kv_heads, d] -> [n, n_heads, d]; evicts afterwards."""
        n, _, head_dim = q.shape
        group = self.n_heads // self.n_kv_heads
        out = np.zeros_like(q)
        for g, kept in enumerate(self.heads):
            n_before = len(kept)
            kept += [Kept(self.seen + t, k[t, g], v[t, g]) for t in range(n)]
            for t in range(n):
                visible = kept[: n_before + t + 1]
                for h in range(g * group, (g + 1) * group):
                    logits = np.array([q[t, h] @ e.k for e in visible]) / np.sqrt(head_dim)
                    p = np.exp(logits - logits.max())
                    p /= p.sum()
                    out[t, h] = sum(p_e * e.v for p_e, e in zip(p, visible, strict=True))
                    for p_e, e in zip(p, visible, strict=True):
                        e.score += p_e
        self.seen += n
        self.heads = [self._survivors(kept) for kept in self.heads]
        return out

    def _survivors(self, kept: list[Kept]) -> list[Kept]:
        policy = self.policy
        if policy.n_recent is None or policy.budget is None or len(kept) <= policy.budget:
            return kept
        first_recent = self.seen - policy.n_recent
        safe = [e for e in kept if e.position < policy.n_sinks or e.position >= first_recent]
        rest = [e for e in kept if policy.n_sinks <= e.position < first_recent]
        rest.sort(key=lambda e: (-e.score, e.position))  # of equal scores the older stays
        if 0 < policy.n_heavy < len(rest):
            gap = rest[policy.n_heavy - 1].score - rest[policy.n_heavy].score
            self.margin = min(self.margin, gap)
        return sorted(safe + rest[: policy.n_heavy], key=lambda e: e.position)
