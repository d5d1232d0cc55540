"""How many sequences fit in a memory budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from h2o_cpp import _core
from h2o_cpp.model.arguments import KvDType, bytes_of, check_context, kv_dtypes
from h2o_cpp.model.model_files import find_model
from h2o_cpp.model.policy import Policy, choose_policy
from h2o_cpp.model.session import Positions, core_policies
from h2o_cpp.model.stored_budget import Budget, resolve_budget, resolve_types

_DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")  # architectures with layers of Gated DeltaNet
_SHORT_CONVOLUTIONS = ("lfm2", "lfm2moe")


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
    def of_model(model: _core.Model) -> ModelShape:
        """From a loaded model."""
        return ModelShape(
            model.n_layers,
            model.n_kv_heads,
            model.head_dim,
            model.n_ctx_train,
            model.learned_positions,
            tuple(model.state_floats),
        )

    @staticmethod
    def of_file(file: _core.GgufFile) -> ModelShape:
        """From a GGUF file. Raises ValueError if of_metadata() finds none."""
        shape = ModelShape.of_metadata(file.metadata())
        if shape is None:
            raise ValueError(
                f"{file.path}: unknown cache size, expected a model whose layers are alike"
            )
        return shape

    @staticmethod
    def of_metadata(metadata: Mapping[str, Any]) -> ModelShape | None:
        """From a GGUF file; None if it is not a model or its layers differ."""
        architecture = metadata.get("general.architecture", "")

        def key(name: str) -> Any:
            return metadata.get(f"{architecture}.{name}")

        heads, width = key("attention.head_count"), key("embedding_length")
        head_dim = key("attention.key_length")
        if not head_dim and isinstance(width, int) and isinstance(heads, int) and heads:
            head_dim = width // heads
        kv_heads = key("attention.head_count_kv") or heads
        if isinstance(kv_heads, list) and len(set(kv_heads) - {0}) == 1:
            kv_heads = max(kv_heads)  # layers without attention have none
        n_layers, unused = key("block_count"), key("nextn_predict_layers")
        if isinstance(n_layers, int) and isinstance(unused, int):
            n_layers -= unused  # for speculation, without a cache
        sizes = (n_layers, kv_heads, head_dim, key("context_length"))
        if not _are_sizes(*sizes):
            return None
        states = _state_floats(architecture, key, sizes[0])
        if states is None:
            return None
        return ModelShape(
            *sizes,
            learned_positions=architecture == "opt",
            state_floats=states,
        )


def _state_floats(
    architecture: str, key: Callable[[str], Any], n_layers: int
) -> tuple[int, ...] | None:
    """ModelShape.state_floats of a file; None if keys are invalid."""
    if architecture in _SHORT_CONVOLUTIONS:
        return _convolution_floats(key, n_layers)
    return _delta_net_floats(key, n_layers) if architecture in _DELTA_NETS else ()


def _are_sizes(*values: object) -> bool:
    return all(isinstance(value, int) and 0 < value < 2**24 for value in values)


def _convolution_floats(key: Callable[[str], Any], n_layers: int) -> tuple[int, ...] | None:
    kv_heads, n_taps = key("attention.head_count_kv"), key("shortconv.l_cache")
    width = key("embedding_length")
    if not isinstance(kv_heads, list) or len(kv_heads) != n_layers or not _are_sizes(n_taps, width):
        return None
    return tuple((n_taps - 1) * width * (n == 0) for n in kv_heads)


def _delta_net_floats(key: Callable[[str], Any], n_layers: int) -> tuple[int, ...] | None:
    names = ("conv_kernel", "state_size", "group_count", "time_step_rank")
    sizes = [key(f"ssm.{name}") for name in names]
    interval, flags = key("full_attention_interval"), key("attention.recurrent_layers")
    interval = 4 if interval is None else interval  # as in config.cpp
    if not _are_sizes(*sizes, interval):
        return None
    if flags is None:
        flags = [(layer + 1) % interval != 0 for layer in range(n_layers)]
    if not isinstance(flags, list) or len(flags) < n_layers:
        return None
    n_taps, head_dim, n_k_heads, n_v_heads = sizes
    before = (n_taps - 1) * (2 * n_k_heads + n_v_heads) * head_dim
    floats = n_v_heads * head_dim**2 + before
    if floats >= 2**62:
        return None
    return tuple(floats * bool(flag) for flag in flags[:n_layers])


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
        file, shape = model.file, ModelShape.of_model(model)
    else:
        file = _core.GgufFile(find_model(model))
        shape = ModelShape.of_file(file)
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
