"""Memory of caches: the policy and the types of K and V that fit, and how many caches fit."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from h2o_cpp import _core
from h2o_cpp.arguments import KvDType, Positions, bytes_of, check_float, kv_dtypes
from h2o_cpp.budget.policy import Policy, core_policies, each, named_policy

DEFAULT_POLICY = "contribution"

# Tried in this order; if not all tokens fit, the last is used: at equal bytes, twice as many tokens
# in q8_0 are better than f16, and values with fewer bits lose more than the additional tokens gain
# (docs/measured/quality.md).
_TYPES = ("f16", "q8_0")
_BLOCK = 32  # other head sizes use f16


@dataclass(frozen=True)
class ModelShape:
    """The parameters that determine a cache's size."""

    n_layers: int
    n_kv_heads: int
    """The most that a layer has."""
    head_dim: int
    """The largest."""
    n_ctx_train: int
    can_roll: bool
    """Whether positions may be ranks among the kept tokens."""
    state_floats: tuple[int, ...] = ()
    """Floats of each layer's recurrent state. Empty: no layer has one."""
    attention_layers: tuple[bool, ...] = ()
    """Whether each layer attends, and has a KV cache. Empty: all layers."""
    shared_values: bool = False
    """Whether the cache holds one latent vector instead of a key and a value."""
    layer_heads: tuple[tuple[int, int], ...] = ()
    """Each layer's number of KV heads, and their size. Empty: all layers have the same."""
    kv_sources: tuple[int, ...] = ()
    """The layer whose cache each layer reads. Empty: all layers have their own."""

    @staticmethod
    def of(model: _core.Config | _core.Model) -> ModelShape:
        """Reads it from a model, or its file's parameters."""
        return ModelShape(
            model.n_layers,
            model.n_kv_heads,
            model.head_dim,
            model.n_ctx_train,
            model.can_roll,
            tuple(model.state_floats),
            tuple(model.attention_layers),
            model.shared_values,
            tuple(model.layer_heads),
            tuple(model.kv_sources),
        )

    @staticmethod
    def of_file(path: str | os.PathLike[str]) -> ModelShape:
        """Reads it from a GGUF file. Raises ValueError if it is not a model that can be run."""
        return ModelShape.of(_core.Config(_core.GgufShards(path)))


def slab_bytes(
    shape: ModelShape,
    policy: Policy | Sequence[Policy],
    *,
    n_ctx: int,
    kv_dtype: KvDType,
    positions: Positions,
) -> int:
    """Bytes of one sequence's cache; n sequences need at most n times as much."""
    bounded = all(one.budget is not None and one.budget < n_ctx for one in each(policy))
    return _core.cache_bytes(
        n_layers=shape.n_layers,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        policies=core_policies(policy),
        max_tokens=n_ctx,
        state_floats=shape.state_floats,
        attention_layers=shape.attention_layers,
        shared_values=shape.shared_values,
        layer_heads=shape.layer_heads,
        sources=shape.kv_sources,
        **kv_dtypes(kv_dtype),
        may_roll=bounded and shape.can_roll and positions != "original",
    )


def default_types(*head_dims: int) -> Sequence[str]:
    """The types that heads of these sizes are tried in, the most precise first."""
    return _TYPES[:1] if any(size % _BLOCK for size in head_dims) else _TYPES


def fit_cache(
    shape: ModelShape,
    memory: float | str,
    policy: str | None,
    *,
    n_ctx: int,
    kv_dtype: KvDType | None,
    positions: Positions,
) -> tuple[Policy, KvDType]:
    """The policy and the types of K and V that keep the most tokens in a sequence's memory.

    memory: a share of a full f16 cache (0.1 or "10%") or a size ("5MiB").
    policy: a policy's name, used if not all tokens fit; default: DEFAULT_POLICY.
    kv_dtype: default: f16 if it holds all n_ctx tokens or the head size is not divisible by 32,
        otherwise q8_0.

    Raises ValueError for unknown names, and if not one token fits.
    """

    def bytes_with(policy: Policy, kv_dtype: KvDType) -> int:
        return slab_bytes(shape, policy, n_ctx=n_ctx, kv_dtype=kv_dtype, positions=positions)

    limit = _limit(memory, bytes_with(Policy.full(), "f16"))
    sizes = (shape.head_dim, *(size for _, size in shape.layer_heads))
    types: Sequence[KvDType] = default_types(*sizes) if kv_dtype is None else [kv_dtype]
    for one in types:
        if bytes_with(Policy.full(), one) <= limit:
            return Policy.full(), one
    make = partial(named_policy, policy or DEFAULT_POLICY)
    fits = bisect_right(range(1, n_ctx), limit, key=lambda n: bytes_with(make(n), types[-1]))
    if fits == 0:
        least = bytes_with(make(1), types[-1])
        raise ValueError(
            f"cache_memory={memory!r} is {limit} bytes, expected at least {least} for one token"
        )
    return make(fits), types[-1]


def _limit(memory: float | str, full: int) -> int:
    """A memory limit in bytes."""
    share = memory
    if isinstance(memory, str):
        if match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", memory):
            share = float(match[1]) / 100
        elif re.fullmatch(r"\s*\d*\.\d+\s*", memory):
            share = float(memory)
        else:
            return bytes_of("cache_memory", memory)
    if not 0 < check_float("cache_memory", share) <= 1:
        raise ValueError(
            f'cache_memory={memory!r}, expected a share above 0 and up to 1, "10%", or "5MiB"'
        )
    return int(float(share) * full)
