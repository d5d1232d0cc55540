"""Random policies and texts for KVCache, by Hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from h2o_cpp import KVCache, Policy, Rope

POLICIES = st.one_of(
    st.just(Policy.full()),
    st.builds(Policy.window, st.integers(1, 8)),
    st.builds(Policy.sinks, st.integers(0, 3), st.integers(1, 8)),
    st.builds(Policy.h2o, st.integers(1, 6), st.integers(0, 6), st.integers(0, 2)),
    st.builds(Policy.h2o, st.just(0), st.integers(1, 6)),
)

OPTIONS = st.builds(
    Policy.h2o,
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(0, 2),
    score=st.sampled_from(["sum", "mean", "inverse"]),
    decay=st.sampled_from([1.0, 0.9, 0.25, 0.0]),
    value_norm=st.sampled_from([None, "l1"]),
)


@dataclass
class Text:
    """Random queries, keys and values, and their chunks."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    chunks: list[int]
    seed: int

    @property
    def n(self) -> int:
        return sum(self.chunks)

    def arrays(self) -> list[NDArray[np.float32]]:
        random = np.random.default_rng(self.seed)
        shapes = [
            (self.n, heads, self.head_dim) for heads in (self.n_heads, *[self.n_kv_heads] * 2)
        ]
        q, k, v = (random.normal(size=shape).astype(np.float32) for shape in shapes)
        return [q * 2, k, v]

    def cache(
        self,
        policy: Policy,
        kv_dtype: str | tuple[str, str] = "f32",
        threads: int = 1,
        rope: Rope | None = None,
        device: str = "cpu",
        output_weight: NDArray[np.float32] | None = None,
    ) -> KVCache:
        return KVCache(
            self.n_heads,
            self.n_kv_heads,
            self.head_dim,
            policy,
            max_tokens=self.n,
            kv_dtype=kv_dtype,
            threads=threads,
            rope=rope,
            device=device,
            output_weight=output_weight,
        )

    def output_weight(self) -> NDArray[np.float32]:
        """A matrix W_O with a different magnitude for each head."""
        random = np.random.default_rng([self.seed, 1])
        heads = random.normal(size=(7, self.n_heads, self.head_dim)) / 7
        heads *= random.uniform(0.1, 2, size=(self.n_heads, self.head_dim))
        return heads.reshape(7, -1).astype(np.float32)

    def run(self, cache: KVCache) -> NDArray[np.float32]:
        """The outputs of all tokens."""
        parts = np.split(np.arange(self.n), np.cumsum(self.chunks)[:-1])
        q, k, v = self.arrays()
        return np.concatenate([cache.attend(q[i], k[i], v[i]) for i in parts])


@st.composite
def texts(draw: st.DrawFn) -> Text:
    n_kv_heads = draw(st.integers(1, 3))
    return Text(
        n_heads=n_kv_heads * draw(st.integers(1, 3)),
        n_kv_heads=n_kv_heads,
        head_dim=draw(st.integers(1, 40)),
        chunks=draw(st.lists(st.integers(1, 12), min_size=1, max_size=8)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
