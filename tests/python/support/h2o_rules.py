"""H2O in numpy, written for clarity: the reference for the core.

One sequence, one layer, float64. Written from the paper; shares no code with the core.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import Policy, Rope

Array = NDArray[np.float64]


@dataclass
class Kept:
    """A cached token of one KV head."""

    position: int
    k: Array
    v: Array
    score: float = 0.0


def rotated(x: Array, position: int, rope: Rope) -> Array:
    """A head's vector rotated to a position."""
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
    """The reference cache. `margin` is the smallest score difference that decided an eviction."""

    n_heads: int
    n_kv_heads: int
    policy: Policy
    rope: Rope | None = None
    output_weight: Array | None = None  # W_O [n, n_heads * d]
    sinks: Array | None = None  # [n_heads] logits in every softmax, without values
    slopes: Array | None = None  # [n_heads] decrease of logits per distance: ALiBi
    seen: int = 0
    margin: float = np.inf
    heads: list[list[Kept]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.heads = [[] for _ in range(self.n_kv_heads)]

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        """q [n, n_heads, d], k and v [n, n_kv_heads, d] -> [n, n_heads, d]; then evicts."""
        n, _, head_dim = q.shape
        group = self.n_heads // self.n_kv_heads
        out = np.zeros_like(q)
        for g, kept in enumerate(self.heads):
            n_before = len(kept)
            kept += [Kept(self.seen + t, k[t, g], v[t, g]) for t in range(n)]
            for t in range(n):
                visible = kept[: n_before + t + 1]
                keys = [self._key(e, rank) for rank, e in enumerate(visible)]
                counts = self.policy.score != "question" or t >= n - 32
                for e in visible:
                    e.score *= self.policy.decay if counts else 1
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
                        e.score += p_e * counts
        self.seen += n
        self.heads = [self._survivors(kept, g) for g, kept in enumerate(self.heads)]
        return out

    def _key(self, e: Kept, rank: int) -> Array:
        if self.rope is None:
            return e.k
        return rotated(e.k, rank if self.rope.positions == "rolling" else e.position, self.rope)

    def _distances(self, visible: list[Kept], rank: int) -> Array:
        """Distances from the last token: of positions, or of cache ranks if positions roll."""
        if self.rope is not None and self.rope.positions == "rolling":
            return rank - np.arange(len(visible), dtype=np.float64)
        return np.array([float(visible[-1].position - e.position) for e in visible])

    def _importance(self, e: Kept, g: int) -> float:
        importance = e.score
        if self.policy.score == "mean":
            importance /= self.seen - e.position
        if self.policy.score == "inverse":
            importance = -importance
        return importance * self._norm(e.v, g)

    def _norm(self, v: Array, g: int) -> float:
        if self.policy.value_norm == "l1":
            return float(np.abs(v).sum())
        if self.policy.value_norm == "output":
            # The contributions of the group's query heads to the output, concatenated.
            assert self.output_weight is not None
            group = self.n_heads // self.n_kv_heads
            heads = np.split(self.output_weight, self.n_heads, axis=1)[g * group : (g + 1) * group]
            return float(np.linalg.norm(np.concatenate([w @ v for w in heads])))
        return 1.0

    def _survivors(self, kept: list[Kept], g: int) -> list[Kept]:
        policy = self.policy
        if policy.n_recent is None or policy.budget is None or len(kept) <= policy.budget:
            return kept
        first_recent = self.seen - policy.n_recent
        safe = [e for e in kept if e.position < policy.n_sinks or e.position >= first_recent]
        rest = [e for e in kept if policy.n_sinks <= e.position < first_recent]
        if policy.score == "question" and len(kept) - policy.budget > 1:
            scores = [e.score for e in rest]  # ordered by position
            for i, e in enumerate(rest):
                e.score = max(scores[max(i - 3, 0) : i + 4])
        rest.sort(key=lambda e: (-self._importance(e, g), e.position))  # ties keep the older token
        if 0 < policy.n_heavy < len(rest):
            last, first_evicted = rest[policy.n_heavy - 1], rest[policy.n_heavy]
            gap = self._importance(last, g) - self._importance(first_evicted, g)
            pooled = policy.score == "question" and gap == 0  # same score as a neighbor
            self.margin = self.margin if pooled else min(self.margin, gap)
        return sorted(safe + rest[: policy.n_heavy], key=lambda e: e.position)
