"""gpt-oss (`GptOssForCausalLM`) as architecture `gpt-oss`: attention sinks, experts in MXFP4."""

import re
from collections.abc import Callable, Iterator

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, check_fixed, dimension, flag, number, refuse
from h2o_cpp.convert.family import Family, Metadata, Module, TensorSpec
from h2o_cpp.convert.rope import rope_metadata
from h2o_cpp.convert.window import window_of_listed_layers

# config.json key, the one value (also HF's default) that these files can express, what else means
_FIXED = (
    ("hidden_act", "silu", "the experts do not use SiLU"),
    ("attention_bias", True, "the attention has no biases"),
    ("swiglu_alpha", 1.702, "another slope of the gate"),
    ("swiglu_limit", 7.0, "other limits of gate and up"),
)

_EMBEDDING = Module("token_embd", "embed_tokens", ("vocab", "embd"))
_HEAD = Module("output", "lm_head", ("vocab", "embd"))
_LAYER = (
    Module("attn_norm", "input_layernorm", ("embd",)),
    Module("attn_q", "self_attn.q_proj", ("q", "embd"), bias=True),
    Module("attn_k", "self_attn.k_proj", ("kv", "embd"), bias=True),
    Module("attn_v", "self_attn.v_proj", ("kv", "embd"), bias=True),
    Module("attn_output", "self_attn.o_proj", ("embd", "q"), bias=True),
    Module("post_attention_norm", "post_attention_layernorm", ("embd",)),
    Module("ffn_gate_inp", "mlp.router", ("experts", "embd"), bias=True),
)


def _sizes(config: Config) -> dict[str, int]:
    width = dimension(config, "hidden_size")
    heads = dimension(config, "num_attention_heads")
    kv_heads = dimension(config, "num_key_value_heads", heads)
    head = dimension(config, "head_dim", width // heads)
    if heads % kv_heads:
        why = f"{heads} heads of Q cannot share them evenly"
        raise refuse("gpt-oss", "num_key_value_heads", kv_heads, why)
    return {
        "vocab": dimension(config, "vocab_size"),
        "embd": width,
        "ff": dimension(config, "intermediate_size"),
        "experts": dimension(config, "num_local_experts"),
        "head": head,
        "q": heads * head,
        "kv": kv_heads * head,
    }


def _metadata(config: Config) -> Metadata:
    check_fixed("gpt-oss", config, _FIXED)
    sizes = _sizes(config)
    used = dimension(config, "num_experts_per_tok")
    if used > sizes["experts"]:
        raise ValueError(
            f"config.json: num_experts_per_tok is {used}, of {sizes['experts']} experts"
        )
    return {
        "context_length": dimension(config, "max_position_embeddings"),
        "embedding_length": sizes["embd"],
        "block_count": dimension(config, "num_hidden_layers"),
        "feed_forward_length": sizes["ff"],
        "expert_feed_forward_length": sizes["ff"],
        "expert_count": sizes["experts"],
        "expert_used_count": used,
        "attention.head_count": sizes["q"] // sizes["head"],
        "attention.head_count_kv": sizes["kv"] // sizes["head"],
        "attention.key_length": sizes["head"],
        "attention.value_length": sizes["head"],
        "attention.layer_norm_rms_epsilon": number(config, "rms_norm_eps", 1e-5),
        "vocab_size": sizes["vocab"],
        "rope.dimension_count": sizes["head"],
        **rope_metadata("gpt-oss", config),
        **window_of_listed_layers(config, period=2),
    }


def _part(first: int) -> Callable[[Values], Values]:
    """Of gate and up, whose columns alternate: [experts, in, 2 out] -> [experts, out, in]."""
    return lambda values: _transposed(values[..., first::2])


def _transposed(values: Values) -> Values:
    return np.ascontiguousarray(values.swapaxes(-1, -2))


def _experts(layer: int, sizes: dict[str, int]) -> Iterator[TensorSpec]:
    n, embd, ff = sizes["experts"], sizes["embd"], sizes["ff"]
    blk, hf = f"blk.{layer}", f"layers.{layer}.mlp.experts"
    for first, part in enumerate(("gate", "up")):
        both = f"{hf}.gate_up_proj"
        weight = TensorSpec(
            f"{blk}.ffn_{part}_exps.weight",
            both,
            (n, embd, 2 * ff),
            transform=_part(first),
            written=(n, ff, embd),
            mxfp4_rows=slice(first, None, 2),
        )
        yield weight
        bias = f"{blk}.ffn_{part}_exps.bias"
        yield TensorSpec(bias, f"{both}_bias", (n, 2 * ff), transform=_every_other(first),
                         written=(n, ff))  # fmt: skip
    yield TensorSpec(
        f"{blk}.ffn_down_exps.weight",
        f"{hf}.down_proj",
        (n, ff, embd),
        transform=_transposed,
        written=(n, embd, ff),
        mxfp4_rows=slice(None),
    )
    yield TensorSpec(f"{blk}.ffn_down_exps.bias", f"{hf}.down_proj_bias", (n, embd))


def _every_other(first: int) -> Callable[[Values], Values]:
    return lambda values: values[..., first::2]


def _tensors(config: Config) -> Iterator[TensorSpec]:
    sizes = _sizes(config)
    heads = sizes["q"] // sizes["head"]
    yield from _EMBEDDING.tensors(sizes)
    for i in range(dimension(config, "num_hidden_layers")):
        for module in _LAYER:
            yield from module.in_layer(i, "layers").tensors(sizes)
        yield TensorSpec(f"blk.{i}.attn_sinks.weight", f"layers.{i}.self_attn.sinks", (heads,))
        yield from _experts(i, sizes)
    yield from Module("output_norm", "norm", ("embd",)).tensors(sizes)
    if not flag(config, "tie_word_embeddings", False):
        yield from _HEAD.tensors(sizes)


GPT_OSS = Family(
    architecture="gpt-oss",
    base_prefix="model.",
    metadata=_metadata,
    tensors=_tensors,
    ignored=re.compile(r"lm_head\.weight"),
    mxfp4=True,
)
