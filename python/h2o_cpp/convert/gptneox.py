"""The GPT-NeoX family (`GPTNeoXForCausalLM`: Pythia, GPT-NeoX-20B) as architecture `gptneox`."""

import re
from collections.abc import Iterator

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, check_fixed, dimension, flag, head_size, number, refuse
from h2o_cpp.convert.family import Family, Metadata, Module, TensorSpec
from h2o_cpp.convert.rope import rope_metadata, rope_parameters, rotated_dimensions


def grouped_by_projection(values: Values, head_size: int) -> Values:
    """Re-orders rows of Q, K, V for each head to all of Q, then all of K, then all of V."""
    by_head: Values = values.reshape(-1, 3, head_size, *values.shape[1:])
    return np.reshape(by_head.swapaxes(0, 1), values.shape)


_EMBEDDING = Module("token_embd", "embed_in", ("vocab", "embd"))
_OUTPUT_NORM = Module("output_norm", "final_layer_norm", ("embd",), bias=True)
_HEAD = Module("output", "embed_out", ("vocab", "embd"))
_LAYER = (
    Module("attn_norm", "input_layernorm", ("embd",), bias=True),
    Module(
        "attn_qkv",
        "attention.query_key_value",
        ("qkv", "embd"),
        bias=True,
        reorder=grouped_by_projection,
    ),
    Module("attn_output", "attention.dense", ("embd", "embd"), bias=True),
    Module("ffn_norm", "post_attention_layernorm", ("embd",), bias=True),
    Module("ffn_up", "mlp.dense_h_to_4h", ("ff", "embd"), bias=True),
    Module("ffn_down", "mlp.dense_4h_to_h", ("embd", "ff"), bias=True),
)

# hidden_act -> our own key h2o.activation, by which our engine tells GELU's exact form from its
# approximation with tanh. ggml's files have no key for it: llama.cpp always computes the latter,
# and so do we for a file without the key.
ACTIVATIONS = {
    "gelu": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# config.json key, the one value (also HF's default) that the files can express, what else means
_FIXED = (
    ("attention_bias", True, "the attention has no biases"),
    ("tie_word_embeddings", False, "the head repeats the embedding"),
)


def _metadata(config: Config) -> Metadata:
    check_fixed("gptneox", config, _FIXED)
    heads = dimension(config, "num_attention_heads")
    activation = config.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise refuse("gptneox", "hidden_act", activation, "the MLP does not use GELU")
    return {
        "context_length": dimension(config, "max_position_embeddings"),
        "embedding_length": dimension(config, "hidden_size"),
        "block_count": dimension(config, "num_hidden_layers"),
        "feed_forward_length": dimension(config, "intermediate_size"),
        "attention.head_count": heads,
        "attention.layer_norm_epsilon": number(config, "layer_norm_eps", 1e-5),
        "use_parallel_residual": flag(config, "use_parallel_residual", True),
        "vocab_size": dimension(config, "vocab_size"),
        "rope.dimension_count": _rotated(config, head_size("gptneox", config)),
        "h2o.activation": ACTIVATIONS[activation],
        **rope_metadata("gptneox", config),
    }


def _rotated(config: Config, head_size: int) -> int:
    """How many dimensions of a head are rotated."""
    key = "partial_rotary_factor"  # transformers 5's name of rotary_pct
    share = rope_parameters(config).get(key, config.get("rotary_pct", 0.25))
    return rotated_dimensions("gptneox", share, head_size)


def _tensors(config: Config) -> Iterator[TensorSpec]:
    width = dimension(config, "hidden_size")
    sizes = {
        "vocab": dimension(config, "vocab_size"),
        "embd": width,
        "qkv": 3 * width,
        "head": head_size("gptneox", config),
        "ff": dimension(config, "intermediate_size"),
    }
    yield from _EMBEDDING.tensors(sizes)
    for i in range(dimension(config, "num_hidden_layers")):
        for module in _LAYER:
            yield from module.in_layer(i, "layers").tensors(sizes)
    yield from _OUTPUT_NORM.tensors(sizes)
    yield from _HEAD.tensors(sizes)


GPTNEOX = Family(
    architecture="gptneox",
    base_prefix="gpt_neox.",
    metadata=_metadata,
    tensors=_tensors,
    # Old checkpoints hold the causal mask, what it adds, and the frequencies of each layer.
    ignored=re.compile(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)
