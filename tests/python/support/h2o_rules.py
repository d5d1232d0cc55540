"""The rules of H2O in numpy, stated for reading, not for speed: what the tests hold the core to.

One sequence, one layer. Float64. Written from the paper and its semantics; it shares nothing with
the core.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import Policy, Rope

Array = NDArray[np.float64]


@dataclass
class Kept:
    """A token in the cache of one KV head."""

    position: int
    k: Array
    v: Array
    score: float = 0.0


def rotated(x: Array, position: int, rope: Rope) -> Array:
    """A head turned by the angles of a position."""
    n_rot = len(x) if rope.n_rot is None else rope.n_rot
    angles = position * rope.theta ** (-np.arange(0, n_rot, 2) / n_rot)
    apart = n_rot // 2 if rope.layout == "halves" else 1
    first = np.arange(n_rot // 2) * (1 if rope.layout == "halves" else 2)
    a, b = x[first], x[first + apart]
    turned: Array = x.copy()
    turned[first] = a * np.cos(angles) - b * np.sin(angles)
    turned[first + apart] = a * np.sin(angles) + b * np.cos(angles)
    return turned


@dataclass
class ReferenceCache:
    """Feed chunks; see what is kept. `margin` is the smallest gap that decided an eviction."""

    n_heads: int
    n_kv_heads: int
    policy: Policy
    rope: Rope | None = None
    sinks: Array | None = None  # [n_heads] logits that join every softmax and have no value
    slopes: Array | None = None  # [n_heads] by which logits fall with the distance: ALiBi
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
                keys = [self._key(e, rank) for rank, e in enumerate(visible)]
                for e in visible:
                    e.score *= self.policy.decay
                for h in range(g * group, (g + 1) * group):
                    query = self._key(Kept(self.seen + t, q[t, h], q[t, h]), n_before + t)
                    logits = np.array([query @ key for key in keys]) / np.sqrt(head_dim)
                    if self.slopes is not None:
                        logits -= self.slopes[h] * self._distances(visible, n_before + t)
                    sink = -np.inf if self.sinks is None else self.sinks[h]
                    largest = max(logits.max(), sink)
                    p = np.exp(logits - largest)
                    p /= p.sum() + np.exp(sink - largest)
                    out[t, h] = sum(p_e * e.v for p_e, e in zip(p, visible, strict=True))
                    for p_e, e in zip(p, visible, strict=True):
                        e.score += p_e
        self.seen += n
        self.heads = [self._survivors(kept) for kept in self.heads]
        return out

    def _key(self, e: Kept, rank: int) -> Array:
        if self.rope is None:
            return e.k
        return rotated(e.k, rank if self.rope.positions == "rolling" else e.position, self.rope)

    def _distances(self, visible: list[Kept], rank: int) -> Array:
        """How far the last of them is from each: in the text, or in the cache where it rolls."""
        if self.rope is not None and self.rope.positions == "rolling":
            return rank - np.arange(len(visible), dtype=np.float64)
        return np.array([float(visible[-1].position - e.position) for e in visible])

    def _worth(self, e: Kept) -> float:
        worth = e.score
        if self.policy.score == "mean":
            worth /= self.seen - e.position
        if self.policy.score == "inverse":
            worth = -worth
        return worth * float(np.abs(e.v).sum()) if self.policy.value_norm else worth

    def _survivors(self, kept: list[Kept]) -> list[Kept]:
        policy = self.policy
        if policy.n_recent is None or policy.budget is None or len(kept) <= policy.budget:
            return kept
        first_recent = self.seen - policy.n_recent
        safe = [e for e in kept if e.position < policy.n_sinks or e.position >= first_recent]
        rest = [e for e in kept if policy.n_sinks <= e.position < first_recent]
        rest.sort(key=lambda e: (-self._worth(e), e.position))  # of equals the older stays
        if 0 < policy.n_heavy < len(rest):
            gap = self._worth(rest[policy.n_heavy - 1]) - self._worth(rest[policy.n_heavy])
            self.margin = min(self.margin, gap)
        return sorted(safe + rest[: policy.n_heavy], key=lambda e: e.position)
