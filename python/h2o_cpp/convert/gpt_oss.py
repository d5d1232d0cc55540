"""gpt-oss (`GptOssForCausalLM`) as architecture `gpt-oss`: attention sinks, experts in MXFP4."""

from collections.abc import Callable, Iterator

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.modules import (
    Mixture,
    Module,
    Sizes,
    TensorSpec,
    qkv,
    transposed,
    transposed_part,
)
from h2o_cpp.convert.window import window_of_listed_layers

_FIXED = (
    ("hidden_act", "silu", "the experts do not use SiLU"),
    ("attention_bias", True, "the attention has no biases"),
    ("swiglu_alpha", 1.702, "another slope of the gate"),
    ("swiglu_limit", 7.0, "other limits of gate and up"),
)

_LAYER = (
    Module("attn_norm", "input_layernorm", ("embd",)),
    *qkv(bias=True),
    Module("attn_output", "self_attn.o_proj", ("embd", "q"), bias=True),
    Module("post_attention_norm", "post_attention_layernorm", ("embd",)),
    Module("ffn_gate_inp", "mlp.router", ("experts", "embd"), bias=True),
)


def _sinks_and_experts(config: Config, layer: int, sizes: Sizes) -> Iterator[TensorSpec]:
    n, embd, ff = sizes["experts"], sizes["embd"], sizes["ff"]
    blk, hf = f"blk.{layer}", f"layers.{layer}.mlp.experts"
    sinks = f"layers.{layer}.self_attn.sinks"
    yield TensorSpec(f"{blk}.attn_sinks.weight", sinks, (sizes["heads"],))
    for first, part in enumerate(("gate", "up")):  # which alternate
        yield TensorSpec(
            f"{blk}.ffn_{part}_exps.weight",
            f"{hf}.gate_up_proj",
            (n, embd, 2 * ff),
            transform=transposed_part(slice(first, None, 2)),
            written=(n, ff, embd),
            mxfp4_rows=slice(first, None, 2),
        )
        yield TensorSpec(
            f"{blk}.ffn_{part}_exps.bias",
            f"{hf}.gate_up_proj_bias",
            (n, 2 * ff),
            transform=_every_other(first),
            written=(n, ff),
        )
    yield TensorSpec(
        f"{blk}.ffn_down_exps.weight",
        f"{hf}.down_proj",
        (n, ff, embd),
        transform=transposed,
        written=(n, embd, ff),
        mxfp4_rows=slice(None),
    )
    yield TensorSpec(f"{blk}.ffn_down_exps.bias", f"{hf}.down_proj_bias", (n, embd))


def _every_other(first: int) -> Callable[[Values], Values]:
    return lambda values: values[..., first::2]


GPT_OSS = Family(
    architecture="gpt-oss",
    layer=lambda config, index: _LAYER,
    fixed=_FIXED,
    details=lambda config, sizes: window_of_listed_layers(config, period=2),
    epsilon=("rms_norm_eps", 1e-5),
    rms=True,
    more_tensors=_sinks_and_experts,
    mixture=Mixture(ff="intermediate_size", says_normalized=False),
    mxfp4=True,
    absent={
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
)

FAMILIES = {"GptOssForCausalLM": GPT_OSS}
