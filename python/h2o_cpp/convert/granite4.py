"""Granite 4 and Bamba, of which most layers may be a state-space model (Mamba-2).

Their GGUF architecture is `granitehybrid`; Granite 4 with attention in all layers is `granite`, or
`granitemoe` with experts. Hybrid Granites have no positions.
"""

from collections.abc import Callable, Iterator

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, Metadata, dimension, layer_flags
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.llama import GRANITE_EXPERTS, granite_scales
from h2o_cpp.convert.llama_layout import pairs_from_halves
from h2o_cpp.convert.mamba import FIXED, Mamba, kv_heads
from h2o_cpp.convert.modules import Module, Sizes, gated_mlp, qkv
from h2o_cpp.convert.rope import rotated_share

_HYBRID = "granitehybrid"
_KINDS = {"mamba": False, "linear_attention": False, "attention": True, "full_attention": True}

_OUTPUT = Module("attn_output", "self_attn.o_proj", ("embd", "q"))


def _mamba(config: Config) -> Mamba:
    width = dimension(config, "mamba_expand", 2) * dimension(config, "hidden_size")
    return Mamba.of(_HYBRID, config, width)


# ---- Granite 4 ----


def _attention_layers(config: Config) -> list[bool]:
    if config.get("layer_types") is None:
        return [False] * dimension(config, "num_hidden_layers")
    return layer_flags(config, _KINDS)


def _granite(config: Config) -> Family:
    """The family of a config.json."""
    n_experts = config.get("num_local_experts", 8)
    experts = n_experts not in (None, 0)
    hybrid = not all(_attention_layers(config))
    plain = "granitemoe" if experts else "granite"
    kind = "_shexp" if experts else ""
    both = "shared_mlp.input_linear", ("shared_both", "embd")
    mlp = (
        Module(f"ffn_gate{kind}", *both, rows=("none", "shared_ff")),
        Module(f"ffn_up{kind}", *both, rows=("shared_ff", "shared_both")),
        Module(f"ffn_down{kind}", "shared_mlp.output_linear", ("embd", "shared_ff")),
    )

    def layer(config: Config, index: int) -> Iterator[Module]:
        yield Module("attn_norm", "input_layernorm", ("embd",))
        if _attention_layers(config)[index]:
            yield from (*qkv(reorder=pairs_from_halves), _OUTPUT)
        else:
            yield from _mamba(config).modules()
        yield Module("ffn_norm", "post_attention_layernorm", ("embd",))
        if experts:
            yield from GRANITE_EXPERTS.modules(config)
        yield from mlp

    def more_sizes(config: Config) -> Sizes:
        ff = dimension(config, "shared_intermediate_size", 1024)
        sizes = {"shared_ff": ff, "shared_both": 2 * ff} | ({} if experts else {"ff": ff})
        return {**sizes, **(_mamba(config).sizes() if hybrid else {})}

    def details(config: Config, sizes: Sizes) -> Metadata:
        values = granite_scales(config)
        if config.get("position_embedding_type") != "rope":
            values["rope.scaling.finetuned"] = False
        if experts:
            values["expert_shared_feed_forward_length"] = sizes["shared_ff"]
        if hybrid:
            values |= _mamba(config).metadata(_HYBRID, config)
            values |= kv_heads(sizes, _attention_layers(config))
        return values

    return Family(
        architecture=_HYBRID if hybrid else plain,
        layer=layer,
        fixed=(
            ("hidden_act", "silu", "the MLP does not use SiLU"),
            ("attention_bias", False, "there are biases"),
            *FIXED,
        ),
        details=details,
        epsilon=("rms_norm_eps", 1e-6),
        rms=True,
        more_sizes=more_sizes,
        more_tensors=lambda config, index, sizes: (
            () if _attention_layers(config)[index] else _mamba(config).tensors(index)
        ),
        mixture=GRANITE_EXPERTS if experts else None,
        absent={"num_local_experts": 8, "num_experts_per_tok": 2},
    )


# ---- Bamba ----


def _rotated(config: Config, sizes: Sizes) -> int:
    return rotated_share(_HYBRID, config, sizes["head"], 0.5)


def _pairs(rotated: int) -> Callable[[Values, int], Values]:
    """Permute the rotated rows of each head: see pairs_from_halves."""

    def reorder(values: Values, head: int) -> Values:
        heads = values.reshape(-1, head, *values.shape[1:])
        first = heads[:, :rotated].reshape(-1, *values.shape[1:])
        pairs = pairs_from_halves(first, rotated).reshape(-1, rotated, *values.shape[1:])
        return np.concatenate([pairs, heads[:, rotated:]], axis=1).reshape(values.shape)

    return reorder


def _attends(config: Config, index: int) -> bool:
    layers = config.get("attn_layer_indices") or []
    if not isinstance(layers, list):
        raise ValueError(f"config.json: attn_layer_indices is {layers!r}, expected a list")
    return index in layers


def _bamba_layer(config: Config, index: int) -> Iterator[Module]:
    yield Module("attn_norm", "input_layernorm", ("embd",))
    if _attends(config, index):
        rotated = _rotated(config, _BAMBA.sizes(config))
        yield from (*qkv(reorder=_pairs(rotated)), _OUTPUT)
    else:
        yield from _mamba(config).modules()
    yield Module("ffn_norm", "pre_ff_layernorm", ("embd",))
    yield from gated_mlp("feed_forward")


def _bamba_details(config: Config, sizes: Sizes) -> Metadata:
    attends = [_attends(config, i) for i in range(sizes["layers"])]
    return _mamba(config).metadata(_HYBRID, config) | kv_heads(sizes, attends)


_BAMBA = Family(
    architecture=_HYBRID,
    layer=_bamba_layer,
    fixed=(
        ("hidden_act", "silu", "the MLP does not use SiLU"),
        ("attention_bias", False, "there are biases"),
        ("mlp_bias", False, "there are biases"),
        *FIXED,
    ),
    details=_bamba_details,
    epsilon=("rms_norm_eps", 1e-5),
    rms=True,
    rotated=_rotated,
    output_norm=Module("output_norm", "final_layernorm", ("embd",)),
    more_sizes=lambda config: _mamba(config).sizes(),
    more_tensors=lambda config, index, sizes: (
        () if _attends(config, index) else _mamba(config).tensors(index)
    ),
    absent={"num_key_value_heads": 8},
)

FAMILIES = {"BambaForCausalLM": _BAMBA}
VARIANTS = {"GraniteMoeHybridForCausalLM": _granite}
