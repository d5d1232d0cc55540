"""The cache alone, for research: attention over a bounded KV cache on numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from h2o_cpp import _core
from h2o_cpp.model.arguments import INT32_MAX, check_float, check_int, kv_dtypes, thread_count
from h2o_cpp.model.policy import Policy
from h2o_cpp.model.session import check_device

_DLPACK_CPU = 1  # kDLCPU


class SupportsDLPack(Protocol):
    """An array of another library: https://dmlc.github.io/dlpack."""

    def __dlpack__(self, **options: Any) -> Any:
        """Its capsule."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Where it is."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of queries and keys (RoFormer, arXiv 2104.09864).

    theta: base of the frequencies. n_rot: rotated dimensions of a head, default: all.
    layout: dimensions that turn together are (i, i + n_rot / 2), "halves" (GPT-NeoX), or
        (2 i, 2 i + 1), "pairs" (Llama's GGUF files).
    positions: "original", in the text; or "rolling", ranks among what is kept, by which keys are
        rotated as they are read.
    """

    theta: float = 10000.0
    n_rot: int | None = None
    layout: Literal["halves", "pairs"] = "halves"
    positions: Literal["original", "rolling"] = "original"

    def core(self, head_dim: int) -> _core.Rotary:
        """For the core."""
        for name, value, known in (
            ("layout", self.layout, ("halves", "pairs")),
            ("positions", self.positions, ("original", "rolling")),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r}, expected {known[0]} or {known[1]}")
        n_rot = head_dim if self.n_rot is None else check_int("n_rot", self.n_rot, 2, head_dim)
        if n_rot % 2:
            raise ValueError(f"n_rot={n_rot}, expected an even number")
        if not 0 < check_float("theta", self.theta) < float("inf"):
            raise ValueError(f"theta={self.theta!r}, expected a number above 0")
        return _core.Rotary(
            [self.theta ** (-i / n_rot) for i in range(0, n_rot, 2)],
            pairs=self.layout == "pairs",
            rolling=self.positions == "rolling",
        )


class KVCache:
    """One layer's cache, for one sequence or several, running the attention code of the engine.

    Raises ValueError for invalid shapes and policies, MemoryError when it does not fit.
    """

    def __init__(
        self,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        policy: Policy,
        *,
        n_sequences: int = 1,
        max_tokens: int | None = None,
        rope: Rope | None = None,
        output_weight: ArrayLike | SupportsDLPack | None = None,
        sink_logits: ArrayLike | None = None,
        alibi_slopes: ArrayLike | None = None,
        kv_dtype: str | tuple[str, str] = "f16",
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        """Allocate the slots.

        n_heads / n_kv_heads query heads share a KV head. max_tokens bounds a sequence: required
        with Policy.full(); otherwise only needed where it is smaller than the policy's budget.
        rope: how queries and keys are rotated; default: not at all.
        output_weight: W_O [n, n_heads * head_dim], by which attend()'s result would be multiplied;
        for policies with value_norm="output".
        sink_logits: [n_heads], of each head an attention sink (gpt-oss): a logit that joins every
        softmax without a value, so that tokens receive less than 1 in all, and score less.
        alibi_slopes: [n_heads], by how much a head's logits fall for each token of distance (ALiBi,
        arXiv 2108.12409). Both are computed on the CPU only.
        kv_dtype: "f32", "f16", "bf16" or, where 32 divides head_dim, "q8_0", "q5_0" (CPU) or
        "q4_0"; or a pair, for K and V.
        """
        _check_policy(policy)
        if max_tokens is None:
            if policy.budget is None:
                raise ValueError("Policy.full() needs max_tokens, how long a sequence may get")
            max_tokens = min(policy.budget + 1, INT32_MAX)
        n_sequences = check_int("n_sequences", n_sequences, 1)
        n_heads = check_int("n_heads", n_heads, 1)
        self._cache = _core.KvCache(
            n_heads,
            check_int("n_kv_heads", n_kv_heads, 1),
            check_int("head_dim", head_dim, 1),
            policy=policy.core(),
            n_sequences=n_sequences,
            rotary=None if rope is None else rope.core(check_int("head_dim", head_dim, 1)),
            sink_logits=_of_heads("sink_logits", sink_logits, n_heads),
            alibi_slopes=_of_heads("alibi_slopes", alibi_slopes, n_heads),
            max_tokens=check_int("max_tokens", max_tokens, 1),
            output_gram=None
            if output_weight is None
            else _gram(_floats(output_weight), n_heads, n_kv_heads, head_dim),
            **kv_dtypes(kv_dtype),
            device=check_device(device),
            threads=thread_count(threads),
        )
        self._policies = [policy] * n_sequences

    @property
    def policy(self) -> Policy:
        """What bounds sequence 0."""
        return self._policies[0]

    def __repr__(self) -> str:
        return f"<KVCache: {self.policy}, {len(self)} tokens seen, {self.nbytes} bytes>"

    def attend(
        self,
        q: ArrayLike | SupportsDLPack,
        k: ArrayLike | SupportsDLPack,
        v: ArrayLike | SupportsDLPack,
        lengths: Mapping[int, int] | None = None,
    ) -> NDArray[np.float32]:
        """Feed the next n >= 1 tokens; return their attention output, then evict.

        q is [n, n_heads, head_dim]; k and v are [n, n_kv_heads, head_dim]; all float32. Token i
        sees what was kept before and the tokens of this call up to itself. Logits are scaled by
        1 / sqrt(head_dim). Returns [n, n_heads, head_dim] float32. Arrays are numpy's, or any that
        know DLPack; those on a GPU come by way of the host.

        Raises ValueError, and has changed nothing, for NaN and infinities, for numbers above
        sqrt(3.4e38 / head_dim) / 2, whose products could leave float32, and for keys and values
        beyond kv_dtype: 65504 in f16, less by sqrt(2) under a rope.

        lengths: how many of the rows each sequence has, by sequence, in the order of the rows;
        default: all are of sequence 0. The result is that of each sequence alone.
        """
        q, k, v = map(_floats, (q, k, v))
        if lengths is None:
            lengths = {0: len(q) if q.ndim else 0}
        return self._cache.attend(q, k, v, list(lengths.items()))

    def positions(self, kv_head: int = 0, *, sequence: int = 0) -> NDArray[np.int32]:
        """Kept positions, ascending."""
        return self._cache.kept(kv_head, sequence)[0]

    def scores(self, kv_head: int = 0, *, sequence: int = 0) -> NDArray[np.float32]:
        """Attention each kept position has received, summed over the query heads of the group.

        In the order of positions(); zeros under a policy without heavy hitters.
        """
        return self._cache.kept(kv_head, sequence)[1]

    def reset(self, sequence: int = 0, policy: Policy | None = None) -> None:
        """Forget a sequence; its slots are free for another text.

        policy: what bounds it from now on; it must do with the slots and the scores that the
        policy of the cache has.
        """
        if policy is not None:
            _check_policy(policy)
        self._cache.reset(sequence, None if policy is None else policy.core())
        if policy is not None:
            self._policies[sequence] = policy

    @property
    def nbytes(self) -> int:
        """Bytes allocated for slots: K, V, positions and scores."""
        return self._cache.nbytes

    def tokens_seen(self, sequence: int = 0) -> int:
        """Tokens of a sequence so far, kept or not."""
        return self._cache.length(sequence)

    def __len__(self) -> int:
        """Tokens seen so far by sequence 0, kept or not."""
        return self.tokens_seen()


def _check_policy(policy: object) -> None:
    if not isinstance(policy, Policy):
        raise TypeError(f"policy={policy!r}, expected a Policy such as Policy.h2o(20, 20)")


def _gram(
    weight: NDArray[np.float32], n_heads: int, n_kv_heads: int, head_dim: int
) -> NDArray[np.float32]:
    """For each KV head the sum of W^T W over the columns W of its query heads."""
    if weight.ndim != 2 or weight.shape[1] != n_heads * head_dim:
        raise ValueError(
            f"output_weight has shape {weight.shape}, expected (n, {n_heads * head_dim})"
        )
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(f"{n_heads} heads cannot share {n_kv_heads} KV heads evenly")
    heads = weight.reshape(len(weight), n_kv_heads, -1, head_dim)
    heads = heads.transpose(1, 3, 0, 2).reshape(n_kv_heads, head_dim, -1)
    gram: NDArray[np.float32] = heads @ heads.transpose(0, 2, 1)
    return gram


def _of_heads(name: str, values: ArrayLike | None, n_heads: int) -> list[float]:
    """A number for each head; none for None."""
    if values is None:
        return []
    array = np.asarray(values, np.float32)
    if array.shape != (n_heads,):
        raise ValueError(f"{name} has shape {list(array.shape)}, expected [{n_heads}]")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has NaN or infinities, expected finite numbers")
    return [float(value) for value in array]


def _floats(x: ArrayLike | SupportsDLPack) -> NDArray[np.float32]:
    if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray):
        array = cast(Any, x)
        on_host = array.__dlpack_device__()[0] == _DLPACK_CPU
        x = np.from_dlpack(array) if on_host else np.from_dlpack(array, device="cpu")
    with np.errstate(over="ignore"):  # an infinity is refused
        return np.asarray(x, np.float32)
