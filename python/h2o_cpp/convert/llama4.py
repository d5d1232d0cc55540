"""Llama 4 (`Llama4ForCausalLM`, and the text of `Llama4ForConditionalGeneration`) as architecture
`llama4`: attention in blocks, experts whose inputs are scaled, and a shared one.
"""

from collections.abc import Iterator

from h2o_cpp.convert.config import Config, Fixed, Metadata, dimension, number, refuse
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.llama import check_unrotated
from h2o_cpp.convert.modules import (
    Mixture,
    Module,
    Sizes,
    TensorSpec,
    gated_mlp,
    qkv,
    transposed,
    transposed_part,
)

_NAME = "llama4"
_UNNORMALIZED = 128  # experts of the only models that do not normalize Q and K

_FIXED: Fixed = (
    ("hidden_act", "silu", "the MLP does not use SiLU"),
    ("attention_bias", False, "there are biases"),
)
_ATTENTION = (
    Module("attn_norm", "input_layernorm", ("embd",)),
    *qkv(),
    Module("attn_output", "self_attn.o_proj", ("embd", "q")),
    Module("ffn_norm", "post_attention_layernorm", ("embd",)),
)
_MIXTURE = (
    Module("ffn_gate_inp", "feed_forward.router", ("experts", "embd")),
    *gated_mlp("feed_forward.shared_expert", kind="_shexp", size="expert_ff"),
)


def _step(config: Config) -> int:
    """The last layer of this many has experts."""
    return dimension(config, "interleave_moe_layer_step", 1)


def _has_experts(config: Config, index: int) -> bool:
    return (index + 1) % _step(config) == 0


def _layer(config: Config, index: int) -> Iterator[Module]:
    yield from _ATTENTION
    yield from _MIXTURE if _has_experts(config, index) else gated_mlp("feed_forward")


def _experts(config: Config, index: int, sizes: Sizes) -> Iterator[TensorSpec]:
    if not _has_experts(config, index):
        return
    n, embd, ff = sizes["experts"], sizes["embd"], sizes["expert_ff"]
    hf = f"layers.{index}.feed_forward.experts"
    for part, columns in (("gate", slice(ff)), ("up", slice(ff, None))):
        yield TensorSpec(
            f"blk.{index}.ffn_{part}_exps.weight",
            f"{hf}.gate_up_proj",
            (n, embd, 2 * ff),
            transform=transposed_part(columns),
            written=(n, ff, embd),
        )
    yield TensorSpec(
        f"blk.{index}.ffn_down_exps.weight",
        f"{hf}.down_proj",
        (n, ff, embd),
        transform=transposed,
        written=(n, embd, ff),
    )


def _details(config: Config, sizes: Sizes) -> Metadata:
    layers = range(sizes["layers"])
    unrotated = config.get("no_rope_layers") or None  # an empty list: by the interval
    check_unrotated(_NAME, {**config, "no_rope_layers": unrotated}, "other layers are rotated")
    normalized = sizes["experts"] != _UNNORMALIZED
    for key, expected, why in (
        ("moe_layers", [i for i in layers if _has_experts(config, i)], "another order of layers"),
        ("use_qk_norm", normalized, "the number of experts says whether it is"),
    ):
        if config.get(key, expected) not in (expected, None):
            raise refuse(_NAME, key, config[key], why)
    tuning = config.get("attn_temperature_tuning", True)
    if not tuning:  # a number in some checkpoints, which transformers 4 takes for true
        why = "queries are not scaled by their positions"
        raise refuse(_NAME, "attn_temperature_tuning", tuning, why)
    values: Metadata = {
        "attention.sliding_window": dimension(config, "attention_chunk_size", 8192),
        "interleave_moe_layer_step": _step(config),
    }
    scale, length = number(config, "attn_scale", 0.1), dimension(config, "floor_scale", 8192)
    if (scale, length) != (0.1, 8192):
        values |= {"attention.temperature_scale": scale, "attention.temperature_length": length}
    return values


_LLAMA4 = Family(
    architecture=_NAME,
    layer=_layer,
    fixed=_FIXED,
    details=_details,
    epsilon=("rms_norm_eps", 1e-5),
    rms=True,
    more_sizes=lambda config: {"ff": dimension(config, "intermediate_size_mlp")},
    more_tensors=_experts,
    mixture=Mixture(ff="intermediate_size", says_normalized=False),
    absent={"rope_theta": 500000.0, "intermediate_size_mlp": 16384, "head_dim": 128},
)

FAMILIES = {"Llama4ForCausalLM": _LLAMA4, "Llama4ForConditionalGeneration": _LLAMA4}
