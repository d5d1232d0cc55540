"""Families with layer norms and rotary positions: StarCoder2, StableLM, Command-R."""

import re
from collections.abc import Iterator

from h2o_cpp.convert.config import Config, check_fixed, dimension, flag, head_size, number, refuse
from h2o_cpp.convert.family import Family, Metadata, Module, TensorSpec
from h2o_cpp.convert.rope import rope_metadata, rope_parameters, rotated_dimensions
from h2o_cpp.convert.window import window_of_every_layer

_EMBEDDING = Module("token_embd", "embed_tokens", ("vocab", "embd"))
_HEAD = Module("output", "lm_head", ("vocab", "embd"))
_IGNORED = re.compile(r"lm_head\.weight|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def _sizes(name: str, config: Config) -> dict[str, int]:
    heads = dimension(config, "num_attention_heads")
    head = head_size(name, config)
    kv_heads = dimension(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        why = f"{heads} heads of Q cannot share them evenly"
        raise refuse(name, "num_key_value_heads", kv_heads, why)
    return {
        "vocab": dimension(config, "vocab_size"),
        "embd": dimension(config, "hidden_size"),
        "ff": dimension(config, "intermediate_size"),
        "head": head,
        "kv": kv_heads * head,
    }


def _metadata(name: str, config: Config, epsilon: str, rotated: int | None = None) -> Metadata:
    sizes = _sizes(name, config)
    return {
        "context_length": dimension(config, "max_position_embeddings"),
        "embedding_length": sizes["embd"],
        "block_count": dimension(config, "num_hidden_layers"),
        "feed_forward_length": sizes["ff"],
        "attention.head_count": sizes["embd"] // sizes["head"],
        "attention.head_count_kv": sizes["kv"] // sizes["head"],
        "attention.layer_norm_epsilon": number(config, epsilon, 1e-5),
        "vocab_size": sizes["vocab"],
        "rope.dimension_count": sizes["head"] if rotated is None else rotated,
        **rope_metadata(name, config),
    }


def _attention(qkv_bias: bool, output_bias: bool) -> Iterator[Module]:
    yield Module("attn_q", "self_attn.q_proj", ("embd", "embd"), qkv_bias)
    yield Module("attn_k", "self_attn.k_proj", ("kv", "embd"), qkv_bias)
    yield Module("attn_v", "self_attn.v_proj", ("kv", "embd"), qkv_bias)
    yield Module("attn_output", "self_attn.o_proj", ("embd", "embd"), output_bias)


_GATED_MLP = (
    Module("ffn_gate", "mlp.gate_proj", ("ff", "embd")),
    Module("ffn_up", "mlp.up_proj", ("ff", "embd")),
    Module("ffn_down", "mlp.down_proj", ("embd", "ff")),
)


def _tensors(
    name: str, config: Config, layer: list[Module], *, norm_bias: bool, tied: bool
) -> Iterator[TensorSpec]:
    sizes = _sizes(name, config)
    yield from _EMBEDDING.tensors(sizes)
    for i in range(dimension(config, "num_hidden_layers")):
        for module in layer:
            yield from module.in_layer(i, "layers").tensors(sizes)
    yield from Module("output_norm", "norm", ("embd",), norm_bias).tensors(sizes)
    if not flag(config, "tie_word_embeddings", tied):
        yield from _HEAD.tensors(sizes)


def _starcoder2_metadata(config: Config) -> Metadata:
    fixed = (
        ("hidden_act", "gelu_pytorch_tanh", "the MLP does not use GELU's form with tanh"),
        ("use_bias", True, "the projections have no biases"),
    )
    check_fixed("starcoder2", config, fixed)
    return _metadata("starcoder2", config, "norm_epsilon") | window_of_every_layer(config)


def _starcoder2_tensors(config: Config) -> Iterator[TensorSpec]:
    layer = [
        Module("attn_norm", "input_layernorm", ("embd",), True),
        *_attention(True, True),
        Module("ffn_norm", "post_attention_layernorm", ("embd",), True),
        Module("ffn_up", "mlp.c_fc", ("ff", "embd"), True),
        Module("ffn_down", "mlp.c_proj", ("embd", "ff"), True),
    ]
    return _tensors("starcoder2", config, layer, norm_bias=True, tied=True)


def _stablelm_metadata(config: Config) -> Metadata:
    fixed = (
        ("hidden_act", "silu", "the MLP does not use SiLU"),
        ("qk_layernorm", False, "q and k are normalised"),
    )
    check_fixed("stablelm", config, fixed)
    key = "partial_rotary_factor"
    share = rope_parameters(config).get(key, config.get(key, 0.25))
    rotated = rotated_dimensions("stablelm", share, head_size("stablelm", config))
    return _metadata("stablelm", config, "layer_norm_eps", rotated) | {
        "use_parallel_residual": flag(config, "use_parallel_residual", False)
    }


def _stablelm_tensors(config: Config) -> Iterator[TensorSpec]:
    layer = [
        Module("attn_norm", "input_layernorm", ("embd",), True),
        *_attention(flag(config, "use_qkv_bias", False), False),
    ]
    if not flag(config, "use_parallel_residual", False):
        layer.append(Module("ffn_norm", "post_attention_layernorm", ("embd",), True))
    layer += _GATED_MLP
    return _tensors("stablelm", config, layer, norm_bias=True, tied=False)


def _command_r_metadata(config: Config) -> Metadata:
    fixed = (
        ("hidden_act", "silu", "the MLP does not use SiLU"),
        ("use_qk_norm", False, "q and k are normalised"),
        ("attention_bias", False, "the attention has biases"),
    )
    check_fixed("command-r", config, fixed)
    return _metadata("command-r", config, "layer_norm_eps") | {
        "logit_scale": number(config, "logit_scale", 0.0625)
    }


def _command_r_tensors(config: Config) -> Iterator[TensorSpec]:
    layer = [
        Module("attn_norm", "input_layernorm", ("embd",)),
        *_attention(False, False),
        *_GATED_MLP,
    ]
    return _tensors("command-r", config, layer, norm_bias=False, tied=True)


STARCODER2 = Family("starcoder2", "model.", _starcoder2_metadata, _starcoder2_tensors, _IGNORED)
STABLELM = Family("stablelm", "model.", _stablelm_metadata, _stablelm_tensors, _IGNORED)
COMMAND_R = Family("command-r", "model.", _command_r_metadata, _command_r_tensors, _IGNORED)
