"""Families of Llama's layout: RMS norms before attention and MLP, SwiGLU, rotary positions.

Llama 1 to 3.2, Mistral and Mixtral are GGUF architecture `llama`, Qwen2 and 2.5 `qwen2`, Qwen3
`qwen3`; those with experts `qwen2moe`, `qwen3moe` and `olmoe`.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, check_fixed, dimension, flag, head_size, number, refuse
from h2o_cpp.convert.experts import (
    MIXTRAL_EXPERTS,
    OLMOE_EXPERTS,
    QWEN2_EXPERTS,
    QWEN3_EXPERTS,
    Mixture,
)
from h2o_cpp.convert.family import Family, Metadata, Module, TensorSpec
from h2o_cpp.convert.rope import rope_metadata, rope_parameters, rope_tensors
from h2o_cpp.convert.window import window_of_every_layer, window_of_some_layers


class _Variant(NamedTuple):
    """What differs between the architectures."""

    architecture: str
    rotates_pairs: bool
    """Rotation is of adjacent dimensions (2i, 2i + 1), not of (i, i + head_size / 2) as in HF."""
    qkv_bias: bool | None
    """Q, K and V have biases; None: if attention_bias is true, and then so has the output."""
    qk_norm: str | None
    """Q and K are normalised: by heads, or as a whole."""
    windows: Callable[[Config], Metadata]
    """The keys of windows of attention."""
    mixture: Mixture | None = None
    """The experts, if there are any instead of one MLP."""


def _no_windows(config: Config) -> Metadata:
    return {}


_LLAMA = _Variant("llama", True, qkv_bias=None, qk_norm=None, windows=_no_windows)
_MISTRAL = _LLAMA._replace(windows=window_of_every_layer)
_QWEN2 = _Variant("qwen2", False, qkv_bias=True, qk_norm=None, windows=window_of_some_layers)
_MIXTRAL = _MISTRAL._replace(mixture=MIXTRAL_EXPERTS)
_QWEN3 = _Variant("qwen3", False, qkv_bias=False, qk_norm="heads", windows=window_of_some_layers)

_QWEN2_MOE = _QWEN2._replace(architecture="qwen2moe", mixture=QWEN2_EXPERTS)
_QWEN3_MOE = _QWEN3._replace(architecture="qwen3moe", mixture=QWEN3_EXPERTS)
_OLMOE = _QWEN3._replace(
    architecture="olmoe", qk_norm="whole", windows=_no_windows, mixture=OLMOE_EXPERTS
)


def pairs_from_halves(values: Values, head_size: int) -> Values:
    """Re-orders rows of each head, so that dimensions i and i + head_size / 2 become adjacent."""
    halves: Values = values.reshape(-1, 2, head_size // 2, *values.shape[1:])
    return np.reshape(halves.swapaxes(1, 2), values.shape)


_EMBEDDING = Module("token_embd", "embed_tokens", ("vocab", "embd"))
_OUTPUT_NORM = Module("output_norm", "norm", ("embd",))
_HEAD = Module("output", "lm_head", ("vocab", "embd"))


def _layer(variant: _Variant, config: Config) -> Iterator[Module]:
    all_biases = variant.qkv_bias is None and flag(config, "attention_bias", False)
    qkv_bias = variant.qkv_bias or all_biases
    mlp_bias = flag(config, "mlp_bias", False)
    reorder = pairs_from_halves if variant.rotates_pairs else None
    yield Module("attn_norm", "input_layernorm", ("embd",))
    yield Module("attn_q", "self_attn.q_proj", ("q", "embd"), qkv_bias, reorder)
    yield Module("attn_k", "self_attn.k_proj", ("kv", "embd"), qkv_bias, reorder)
    yield Module("attn_v", "self_attn.v_proj", ("kv", "embd"), qkv_bias)
    if variant.qk_norm:
        whole = variant.qk_norm == "whole"
        yield Module("attn_q_norm", "self_attn.q_norm", ("q" if whole else "head",))
        yield Module("attn_k_norm", "self_attn.k_norm", ("kv" if whole else "head",))
    yield Module("attn_output", "self_attn.o_proj", ("embd", "q"), all_biases)
    yield Module("ffn_norm", "post_attention_layernorm", ("embd",))
    if variant.mixture is not None:
        yield from variant.mixture.modules()
        return
    yield Module("ffn_gate", "mlp.gate_proj", ("ff", "embd"), mlp_bias)
    yield Module("ffn_up", "mlp.up_proj", ("ff", "embd"), mlp_bias)
    yield Module("ffn_down", "mlp.down_proj", ("embd", "ff"), mlp_bias)


# config.json key, the one value (also HF's default) that these files can express, what else means
_FIXED = (("hidden_act", "silu", "the MLP does not use SiLU"),)
_FIXED_QWEN = (
    ("attention_bias", False, "the attention has biases that its official checkpoints lack"),
    ("mlp_bias", False, "the MLP has biases"),
)


def _sizes(variant: _Variant, config: Config) -> dict[str, int]:
    width = dimension(config, "hidden_size")
    heads = dimension(config, "num_attention_heads")
    head = dimension(config, "head_dim", width // heads)
    mixture = variant.mixture
    return {
        "vocab": dimension(config, "vocab_size"),
        "embd": width,
        "ff": dimension(config, "intermediate_size"),
        "head": head,
        "q": heads * head,
        "kv": dimension(config, "num_key_value_heads", heads) * head,
        **({} if mixture is None else mixture.sizes(config)),
    }


def _family(variant: _Variant) -> Family:
    name = variant.architecture

    def metadata(config: Config) -> Metadata:
        check_fixed(name, config, _FIXED if name == "llama" else _FIXED + _FIXED_QWEN)
        _check_heads(variant, config)
        sizes = _sizes(variant, config)
        kv_heads = sizes["kv"] // sizes["head"]
        values: Metadata = {
            "context_length": dimension(config, "max_position_embeddings"),
            "embedding_length": sizes["embd"],
            "block_count": dimension(config, "num_hidden_layers"),
            "feed_forward_length": sizes["ff"],
            "attention.head_count": sizes["q"] // sizes["head"],
            "attention.head_count_kv": kv_heads,
            "attention.layer_norm_rms_epsilon": number(config, "rms_norm_eps", 1e-6),
            "vocab_size": sizes["vocab"],
            "rope.dimension_count": sizes["head"],
        }
        if config.get("head_dim") is not None:
            values["attention.key_length"] = values["attention.value_length"] = sizes["head"]
        if variant.mixture is not None:
            values |= variant.mixture.metadata(config)
        return values | rope_metadata(name, config) | variant.windows(config)

    def tensors(config: Config) -> Iterator[TensorSpec]:
        sizes = _sizes(variant, config)
        yield from _EMBEDDING.tensors(sizes)
        for i in range(dimension(config, "num_hidden_layers")):
            for module in _layer(variant, config):
                yield from module.in_layer(i, "layers").tensors(sizes)
        yield from _OUTPUT_NORM.tensors(sizes)
        if not flag(config, "tie_word_embeddings", False):
            yield from _HEAD.tensors(sizes)

    return Family(
        architecture=name,
        base_prefix="model.",
        metadata=metadata,
        tensors=tensors,
        computed=lambda config: rope_tensors(config, _sizes(variant, config)["head"]),
        # The head of a tied checkpoint repeats the embedding; old checkpoints hold frequencies.
        ignored=re.compile(r"lm_head\.weight|layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    )


def _check_heads(variant: _Variant, config: Config) -> None:
    name = variant.architecture
    heads = dimension(config, "num_attention_heads")
    kv_heads = dimension(config, "num_key_value_heads", heads)
    if config.get("head_dim") is None:
        head_size(name, config)
    if heads % kv_heads:
        why = f"{heads} heads of Q cannot share them evenly"
        raise refuse(name, "num_key_value_heads", kv_heads, why)
    head = _sizes(variant, config)["head"]
    if head % 2:
        raise refuse(name, "head_dim", head, "a head has no halves to rotate")
    partial = rope_parameters(config).get("partial_rotary_factor", 1.0)
    if partial != 1:
        raise refuse(name, "partial_rotary_factor", partial, "only a part of a head is rotated")


LLAMA, MISTRAL = _family(_LLAMA), _family(_MISTRAL)
QWEN2, QWEN3 = _family(_QWEN2), _family(_QWEN3)
MIXTRAL, OLMOE = _family(_MIXTRAL), _family(_OLMOE)
QWEN2_MOE, QWEN3_MOE = _family(_QWEN2_MOE), _family(_QWEN3_MOE)
