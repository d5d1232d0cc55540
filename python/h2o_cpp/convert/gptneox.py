"""The GPT-NeoX family (`GPTNeoXForCausalLM`: Pythia, GPT-NeoX-20B) as architecture `gptneox`."""

import re

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, Metadata, flag, refuse
from h2o_cpp.convert.family import Family, Module
from h2o_cpp.convert.rope import rotated_share
from h2o_cpp.convert.sizes import Sizes


def grouped_by_projection(values: Values, head_size: int) -> Values:
    """Permute rows from Q, K, V per head to all Q, all K, all V."""
    by_head: Values = values.reshape(-1, 3, head_size, *values.shape[1:])
    return np.reshape(by_head.swapaxes(0, 1), values.shape)


def layer_with_grouped_qkv(attention: str) -> tuple[Module, ...]:
    """A layer of GPT-NeoX or BLOOM; `attention` is the HF name of its attention."""
    qkv = f"{attention}.query_key_value"
    return (
        Module("attn_norm", "input_layernorm", ("embd",), bias=True),
        Module("attn_qkv", qkv, ("qkv", "embd"), bias=True, reorder=grouped_by_projection),
        Module("attn_output", f"{attention}.dense", ("embd", "embd"), bias=True),
        Module("ffn_norm", "post_attention_layernorm", ("embd",), bias=True),
        Module("ffn_up", "mlp.dense_h_to_4h", ("ff", "embd"), bias=True),
        Module("ffn_down", "mlp.dense_4h_to_h", ("embd", "ff"), bias=True),
    )


_LAYER = layer_with_grouped_qkv("attention")

# config.json's activation -> h2o.activation, a key of our own that distinguishes exact GELU from
# its tanh approximation. GGUF has no such key: llama.cpp always computes the approximation, and so
# does the engine for files without the key.
_ACTIVATIONS = {
    "gelu": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def gelu_form(architecture: str, config: Config, key: str, default: str) -> Metadata:
    """The key h2o.activation; `key`: in config.json. Raises ValueError unless it is a GELU."""
    activation = config.get(key, default)
    if activation not in _ACTIVATIONS:
        raise refuse(architecture, key, activation, "the MLP does not use GELU")
    return {"h2o.activation": _ACTIVATIONS[activation]}


def _details(config: Config, sizes: Sizes) -> Metadata:
    parallel = flag(config, "use_parallel_residual", True)
    return {"use_parallel_residual": parallel, **gelu_form("gptneox", config, "hidden_act", "gelu")}


GPTNEOX = Family(
    architecture="gptneox",
    layer=lambda config, index: _LAYER,
    fixed=(
        ("attention_bias", True, "the attention has no biases"),
        ("tie_word_embeddings", False, "the head repeats the embedding"),
    ),
    details=_details,
    # rotary_pct: before transformers 5
    rotated=lambda config, sizes: rotated_share(
        "gptneox", config, sizes["head"], 0.25, "rotary_pct"
    ),
    base_prefix="gpt_neox.",
    embeddings=(Module("token_embd", "embed_in", ("vocab", "embd")),),
    output_norm=Module("output_norm", "final_layer_norm", ("embd",), bias=True),
    head=Module("output", "embed_out", ("vocab", "embd")),
    # Old checkpoints have causal masks, masked values and frequencies.
    ignored=re.compile(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)

FAMILIES = {"GPTNeoXForCausalLM": GPTNEOX}
