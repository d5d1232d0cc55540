"""The cache alone, for research: attention over a bounded KV cache with numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from h2o_cpp import _core
from h2o_cpp.arguments import INT32_MAX, check_float, check_int, kv_dtypes, thread_count
from h2o_cpp.budget.policy import Policy
from h2o_cpp.options import check_device

_DLPACK_CPU = 1  # kDLCPU


class SupportsDLPack(Protocol):
    """An array that supports DLPack: https://dmlc.github.io/dlpack."""

    def __dlpack__(self, **options: Any) -> Any:
        """The DLPack capsule."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """(device type, device id)."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of queries and keys (RoFormer, arXiv 2104.09864).

    theta: base of the frequencies.
    n_rot: rotated dimensions of a head, an even number; default: all.
    layout: which dimensions are rotated together: "halves", (i, i + n_rot / 2), as in GPT-NeoX; or
        "pairs", (2 i, 2 i + 1), as in Llama's GGUF files.
    positions: "original", in the text; or "rolling", among the kept tokens; then keys are rotated
        when they are read.
    """

    theta: float = 10000.0
    n_rot: int | None = None
    layout: Literal["halves", "pairs"] = "halves"
    positions: Literal["original", "rolling"] = "original"

    def core(self, head_dim: int) -> _core.Rotary:
        """Returns the core's value."""
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
    """The cache of one layer, for one or more sequences, with the engine's attention code.

    Methods raise ValueError for invalid shapes, policies, KV heads and sequences.
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

        n_heads: query heads, a multiple of n_kv_heads; n_heads / n_kv_heads share a KV head.
        policy: what each sequence keeps.
        n_sequences: how many sequences the cache holds.
        max_tokens: most tokens of a sequence. Required with Policy.full(); otherwise only needed
            if it is smaller than the policy's budget.
        rope: how queries and keys are rotated; default: not at all.
        output_weight: W_O, [n, n_heads * head_dim], which the model multiplies with attend()'s
            result. Required by policies with value_norm="output".
        sink_logits: [n_heads], an attention sink per head, as in gpt-oss (CPU): a logit without a
            value in every softmax, so that the tokens together receive less than 1.
        alibi_slopes: [n_heads], how much a head's logits fall per token of distance (ALiBi, arXiv
            2108.12409; CPU).
        kv_dtype: "f32", "f16", "bf16" or, if head_dim is divisible by 32, "q8_0", "q5_0" (not on
            CUDA) or "q4_0"; or a pair (K, V).
        device: "cpu", "cuda", "cuda:N", "vulkan" or "vulkan:N". "auto" is the CPU, in whose memory
            the arrays are.
        threads: CPU threads; default: one per core.

        Raises ValueError for invalid arguments, MemoryError if the slots do not fit.
        """
        _check_policy(policy)
        self._most = policy.budget if max_tokens is None else None  # tokens that the slots hold
        if max_tokens is None:
            if policy.budget is None:
                raise ValueError("Policy.full() needs max_tokens, the most tokens of a sequence")
            max_tokens = min(policy.budget + 1, INT32_MAX)
        n_sequences = check_int("n_sequences", n_sequences, 1)
        n_heads = check_int("n_heads", n_heads, 1)
        n_kv_heads = check_int("n_kv_heads", n_kv_heads, 1)
        head_dim = check_int("head_dim", head_dim, 1)
        self._cache = _core.KvCache(
            n_heads,
            n_kv_heads,
            head_dim,
            policy=policy.core(),
            n_sequences=n_sequences,
            rotary=None if rope is None else rope.core(head_dim),
            sink_logits=_of_heads("sink_logits", sink_logits, n_heads),
            alibi_slopes=_of_heads("alibi_slopes", alibi_slopes, n_heads),
            max_tokens=check_int("max_tokens", max_tokens, 1),
            output_gram=None
            if output_weight is None
            else _gram(_floats("output_weight", output_weight), n_heads, n_kv_heads, head_dim),
            **kv_dtypes(kv_dtype),
            device=check_device(device),
            threads=thread_count(threads),
        )
        self._policies = [policy] * n_sequences

    @property
    def policy(self) -> Policy:
        """The policy of sequence 0."""
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
        """Read the next n >= 1 tokens, return their attention output, then evict.

        q: float32 [n, n_heads, head_dim], from numpy or any library with DLPack. Arrays on a GPU
            are copied to the host.
        k, v: float32 [n, n_kv_heads, head_dim].
        lengths: {sequence: number of its rows}, in the order of the rows; default: all rows belong
            to sequence 0. Results do not depend on the other sequences.

        Returns float32 [n, n_heads, head_dim]. Token i attends to the tokens kept before and to
        those of this call up to itself, with logits scaled by 1 / sqrt(head_dim).

        Raises ValueError, and leaves the cache unchanged, for NaN and infinities; for numbers above
        sqrt(3.4e38 / head_dim) / 2, whose products could exceed float32; and for keys and values
        that kv_dtype cannot hold: above 65504 in f16, above 65504 / sqrt(2) with a rope.
        """
        q, k, v = map(_floats, "qkv", (q, k, v))
        if lengths is None:
            lengths = {0: len(q) if q.ndim else 0}
        if not isinstance(lengths, Mapping):
            raise TypeError(
                f"lengths={lengths!r}, expected a dict of sequences and numbers of rows"
            )
        return self._cache.attend(q, k, v, list(lengths.items()))

    def positions(self, kv_head: int = 0, *, sequence: int = 0) -> NDArray[np.int32]:
        """Kept positions of a KV head, ascending, int32 [n]."""
        return self._cache.kept(kv_head, sequence)[0]

    def scores(self, kv_head: int = 0, *, sequence: int = 0) -> NDArray[np.float32]:
        """Scores of the kept tokens, float32 [n], in the order of positions().

        By default, the attention that each token has received from all query heads of the KV head.
        Zeros for a policy without heavy hitters.
        """
        return self._cache.kept(kv_head, sequence)[1]

    def reset(self, sequence: int = 0, policy: Policy | None = None) -> None:
        """Clear a sequence for reuse.

        policy: its new policy, which must fit the slots and scores of the cache's policy; default:
            no change.
        """
        if policy is not None:
            _check_policy(policy)
            if self._most is not None and (policy.budget is None or policy.budget > self._most):
                raise ValueError(
                    f"the policy keeps {policy.budget or 'all'} tokens, the cache has slots for "
                    f"{self._most}; create it with max_tokens"
                )
        self._cache.reset(sequence, None if policy is None else policy.core())
        if policy is not None:
            self._policies[sequence] = policy

    @property
    def nbytes(self) -> int:
        """Bytes allocated for slots: K, V, positions and scores."""
        return self._cache.nbytes

    def tokens_seen(self, sequence: int = 0) -> int:
        """Tokens that a sequence has read, kept or not."""
        return self._cache.length(sequence)

    def __len__(self) -> int:
        """Tokens that sequence 0 has read, kept or not."""
        return self.tokens_seen()


def _check_policy(policy: object) -> None:
    if not isinstance(policy, Policy):
        raise TypeError(f"policy={policy!r}, expected a Policy such as Policy.h2o(20, 20)")


def _gram(
    weight: NDArray[np.float32], n_heads: int, n_kv_heads: int, head_dim: int
) -> NDArray[np.float32]:
    """Per KV head, the sum of W^T W over the columns W of its query heads, float32."""
    if weight.ndim != 2 or weight.shape[1] != n_heads * head_dim:
        raise ValueError(
            f"output_weight has shape {weight.shape}, expected (n, {n_heads * head_dim})"
        )
    if n_heads % n_kv_heads:
        raise ValueError(f"n_heads={n_heads}, expected a multiple of n_kv_heads={n_kv_heads}")
    heads = weight.reshape(len(weight), n_kv_heads, -1, head_dim)
    heads = heads.transpose(1, 3, 0, 2).reshape(n_kv_heads, head_dim, -1)
    gram: NDArray[np.float32] = heads @ heads.transpose(0, 2, 1)
    return gram


def _of_heads(name: str, values: ArrayLike | None, n_heads: int) -> list[float]:
    """A number per head; empty for None."""
    if values is None:
        return []
    array = _floats(name, values)
    if array.shape != (n_heads,):
        raise ValueError(f"{name} has shape {list(array.shape)}, expected [{n_heads}]")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has NaN or infinities, expected finite numbers")
    return [float(value) for value in array]


def _floats(name: str, x: ArrayLike | SupportsDLPack) -> NDArray[np.float32]:
    if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray):
        array = cast(Any, x)
        on_host = array.__dlpack_device__()[0] == _DLPACK_CPU
        x = np.from_dlpack(array) if on_host else np.from_dlpack(array, device="cpu")
    if np.iscomplexobj(x):
        raise ValueError(f"{name} has complex numbers, expected real ones")
    with np.errstate(over="ignore"):  # infinities are rejected
        return np.asarray(x, np.float32)
