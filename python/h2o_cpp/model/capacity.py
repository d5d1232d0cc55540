"""How many sequences fit in a memory budget."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from h2o_cpp import _core
from h2o_cpp.model.arguments import KvDType, bytes_of, check_context, kv_dtypes
from h2o_cpp.model.model_files import find_model
from h2o_cpp.model.policy import Policy, choose_policy
from h2o_cpp.model.session import Positions, core_policies
from h2o_cpp.model.stored_budget import Budget, resolve_budget, resolve_types


@dataclass(frozen=True)
class ModelShape:
    """The parameters that determine a cache's size."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    n_ctx_train: int
    learned_positions: bool
    state_floats: tuple[int, ...] = ()
    """Of each layer; 0: it has a KV cache. Empty: all layers have one."""

    @staticmethod
    def of(model: _core.Config | _core.Model) -> ModelShape:
        """From a model, or its file's parameters."""
        return ModelShape(
            model.n_layers,
            model.n_kv_heads,
            model.head_dim,
            model.n_ctx_train,
            model.learned_positions,
            tuple(model.state_floats),
        )

    @staticmethod
    def of_file(path: str | os.PathLike[str]) -> ModelShape:
        """From a GGUF file. Raises ValueError if it is not a model that can be run."""
        return ModelShape.of(_core.Config(_core.GgufShards(path)))


def capacity(
    model: str | os.PathLike[str] | _core.Model,
    memory: int | str,
    *,
    hh: Budget = None,
    recent: float | None = None,
    policy: str | Policy | Sequence[Policy] | None = None,
    n_ctx: int | None = None,
    kv_dtype: str | tuple[str, str] | None = None,
    positions: Positions = "auto",
) -> int:
    """How many sequences' caches fit in `memory`: "4GiB", "1.5GB" or a number of bytes; may be 0.

    The memory is only for caches, not for weights and activations. The other arguments are those of
    Generator.

    Raises FileNotFoundError and ValueError.
    """
    n_bytes = bytes_of("memory", memory)
    if isinstance(model, _core.Model):
        file, shape = model.file, ModelShape.of(model)
    else:
        path = find_model(model)
        file, shape = _core.GgufFile(path), ModelShape.of_file(path)
    n_ctx = check_context(n_ctx, shape.n_ctx_train)
    kv_dtype = resolve_types(hh, kv_dtype, file)
    hh, policy = resolve_budget(hh, policy, file, recent=recent)
    chosen = choose_policy(hh, recent, policy, n_ctx)
    each = slab_bytes(shape, chosen, n_ctx=n_ctx, kv_dtype=kv_dtype, positions=positions)
    return n_bytes // each


def slab_bytes(
    shape: ModelShape,
    policy: Policy | Sequence[Policy],
    *,
    n_ctx: int,
    kv_dtype: KvDType,
    positions: Positions,
) -> int:
    """Bytes of one sequence's cache; n sequences need at most n times as much."""
    policies = [policy] if isinstance(policy, Policy) else policy
    bounded = all(one.budget is not None and one.budget < n_ctx for one in policies)
    return _core.cache_bytes(
        n_layers=shape.n_layers,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        policies=core_policies(policy),
        max_tokens=n_ctx,
        state_floats=shape.state_floats,
        **kv_dtypes(kv_dtype),
        may_roll=bounded and not shape.learned_positions and positions != "original",
    )
