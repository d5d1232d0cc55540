"""The cache alone, for research: attention over a bounded KV cache on numpy arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from h2o_cpp import _core
from h2o_cpp.arguments import INT32_MAX, kv_dtypes, whole
from h2o_cpp.policy import Policy


class KVCache:
    """One layer's cache for one sequence, running the attention code of the engine.

    Raises ValueError for shapes and policies that make no sense, MemoryError when it does not fit.
    """

    def __init__(
        self,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        policy: Policy,
        *,
        max_tokens: int | None = None,
        kv_dtype: str | tuple[str, str] = "f16",
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        """Allocate the slots.

        n_heads / n_kv_heads query heads share a KV head. max_tokens bounds the sequence: required
        with Policy.full(); otherwise only needed where it is smaller than the policy's budget.
        kv_dtype is "f32", "f16", "bf16" or, where 32 divides head_dim, "q8_0" or "q4_0"; or a pair,
        for K and V.
        """
        if max_tokens is None:
            if policy.budget is None:
                raise ValueError("KVCache: Policy.full() needs max_tokens")
            max_tokens = min(policy.budget + 1, INT32_MAX)
        self.policy = policy
        self._cache = _core.KvCache(
            whole("n_heads", n_heads, 1),
            whole("n_kv_heads", n_kv_heads, 1),
            whole("head_dim", head_dim, 1),
            **policy.limits(),
            max_tokens=whole("max_tokens", max_tokens, 1),
            **kv_dtypes(kv_dtype),
            device=device,
            threads=0 if threads is None else whole("threads", threads, 1),
        )

    def __repr__(self) -> str:
        return f"<KVCache: {self.policy}, {len(self)} tokens seen, {self.nbytes} bytes>"

    def attend(self, q: ArrayLike, k: ArrayLike, v: ArrayLike) -> NDArray[np.float32]:
        """Feed the next n >= 1 tokens; return their attention output, then evict.

        q is [n, n_heads, head_dim]; k and v are [n, n_kv_heads, head_dim]; all float32. Token i
        sees what was kept before and the tokens of this call up to itself. Logits are scaled by
        1 / sqrt(head_dim). Returns [n, n_heads, head_dim] float32.
        """
        return self._cache.attend(
            np.asarray(q, np.float32), np.asarray(k, np.float32), np.asarray(v, np.float32)
        )

    def positions(self, kv_head: int = 0) -> NDArray[np.int32]:
        """Kept positions, ascending."""
        return self._cache.kept(kv_head)[0]

    def scores(self, kv_head: int = 0) -> NDArray[np.float32]:
        """Attention each kept position has received, summed over the query heads of the group.

        In the order of positions(); zeros under a policy without heavy hitters.
        """
        return self._cache.kept(kv_head)[1]

    def reset(self) -> None:
        """Forget everything."""
        self._cache.reset()

    @property
    def nbytes(self) -> int:
        """Bytes allocated for slots: K, V, positions and scores."""
        return self._cache.nbytes

    def __len__(self) -> int:
        """Tokens seen so far, kept or not."""
        return self._cache.length
