"""LFM2, dense (`lfm2`) and with experts (`lfm2moe`).

Most layers are gated short convolutions; the others are attention.
"""

from collections.abc import Iterator
from dataclasses import replace

from h2o_cpp.convert.config import Config, Metadata, dimension, flag, found_key, layer_flags, number
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.modules import (
    MIXTRAL_EXPERTS,
    Module,
    Sizes,
    TensorSpec,
    gated_mlp,
    qkv,
    without_channels,
)

_KINDS = {"conv": True, "full_attention": False}

_CONVOLUTION = (
    Module("shortconv.in_proj", "conv.in_proj", ("bcx", "embd")),
    Module("shortconv.out_proj", "conv.out_proj", ("embd", "embd")),
)
_ATTENTION = (
    *qkv(),
    Module("attn_q_norm", "self_attn.q_layernorm", ("head",)),
    Module("attn_k_norm", "self_attn.k_layernorm", ("head",)),
    Module("attn_output", "self_attn.out_proj", ("embd", "q")),
)
_MLP = gated_mlp("feed_forward", ("w1", "w3", "w2"))
_EXPERTS = MIXTRAL_EXPERTS._replace(
    router="feed_forward.gate",
    experts="feed_forward.experts.{}",
    ff="moe_intermediate_size",
    says_ff=True,
    n_dense="num_dense_layers",
    sigmoid=True,
    bias="feed_forward.expert_bias",
)


def _convolutions(config: Config) -> list[bool]:
    """Which layers are convolutions, by layer_types or else by full_attn_idxs."""
    if config.get("layer_types") is not None:
        return layer_flags(config, _KINDS)
    layers = range(dimension(config, "num_hidden_layers"))
    attention = config.get("full_attn_idxs")
    if attention is None:
        attention = list(layers)
    if not isinstance(attention, list) or not set(attention) <= set(layers):
        raise ValueError(
            f"config.json: full_attn_idxs must list layers from 0 to {len(layers) - 1},"
            f" found {attention!r}"
        )
    return [i not in attention for i in layers]


def _ff(config: Config) -> int:
    """The size of the MLP."""
    ff = dimension(config, found_key(config, ("block_ff_dim", "intermediate_size")))
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return ff
    multiple = dimension(config, "block_multiple_of", 256)
    ff = int(number(config, "block_ffn_dim_multiplier", 1.0) * int(2 * ff / 3))
    return -(-ff // multiple) * multiple


def _more_sizes(config: Config) -> Sizes:
    return {"bcx": 3 * dimension(config, "hidden_size")}


def _details(config: Config, sizes: Sizes) -> Metadata:
    kv_heads = [0 if conv else sizes["kv_heads"] for conv in _convolutions(config)]
    return {"attention.head_count_kv": kv_heads, "shortconv.l_cache": _taps(config)}


def _taps(config: Config) -> int:
    return dimension(config, "conv_L_cache", 3)


def _layer(config: Config, index: int, mlp: tuple[Module, ...]) -> Iterator[Module]:
    yield Module("attn_norm", "operator_norm", ("embd",))
    yield from _CONVOLUTION if _convolutions(config)[index] else _ATTENTION
    yield Module("ffn_norm", "ffn_norm", ("embd",))
    yield from mlp


def _weights_of_taps(config: Config, index: int, sizes: Sizes) -> Iterator[TensorSpec]:
    """The convolution's weights, which are not a matrix in the checkpoint."""
    if not _convolutions(config)[index]:
        return
    shape = sizes["embd"], _taps(config)
    yield TensorSpec(
        f"blk.{index}.shortconv.conv.weight",
        f"layers.{index}.conv.conv.weight",
        (shape[0], 1, shape[1]),
        transform=without_channels,
        written=shape,
    )


LFM2 = Family(
    architecture="lfm2",
    layer=lambda config, index: _layer(config, index, _MLP),
    fixed=(("conv_bias", False, "the convolutions have biases"),),
    details=_details,
    epsilon=("norm_eps", 1e-5),
    rms=True,
    output_norm=Module("token_embd_norm", "embedding_norm", ("embd",)),
    tied=True,
    tied_keys=("tie_embedding", "tie_word_embeddings"),
    more_sizes=lambda config: {"ff": _ff(config), **_more_sizes(config)},
    more_tensors=_weights_of_taps,
    absent={
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "max_position_embeddings": 128000,
    },
)


def _expert_layer(config: Config, index: int) -> Iterator[Module]:
    dense = index < _EXPERTS.dense_layers(config)
    return _layer(config, index, _MLP if dense else tuple(_EXPERTS.modules(config)))


LFM2_MOE = replace(
    LFM2,
    architecture="lfm2moe",
    layer=_expert_layer,
    fixed=(
        *LFM2.fixed,
        ("use_expert_bias", True, "the scores of experts have no bias"),
        ("norm_topk_prob", True, "the weights of a token's experts do not sum to 1"),
        ("routed_scaling_factor", 1.0, "the weights of a token's experts are scaled"),
    ),
    more_sizes=_more_sizes,
    mixture=_EXPERTS,
    absent={
        **LFM2.absent,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
)

FAMILIES = {
    "Lfm2ForCausalLM": LFM2,
    "LFM2ForCausalLM": LFM2,  # first checkpoints
    "Lfm2MoeForCausalLM": LFM2_MOE,
}
