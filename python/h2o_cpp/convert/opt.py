"""The OPT family (Zhang et al. 2022, `OPTForCausalLM`) as GGUF architecture `opt`.

ggml has no official `opt`; the names are those of its forks (SparkInfer, llama.cpp PR 13799).
"""

import re
from collections.abc import Iterator

from h2o_cpp.convert.config import Config, check_fixed, dimension, flag, head_size, refuse
from h2o_cpp.convert.family import Family, Metadata, Module, TensorSpec

_LAYER_NORM_EPSILON = 1e-5  # PyTorch's default; OPT's config.json has no key for it
_POSITION_OFFSET = 2  # HF looks position p up in row p + 2; rows 0 and 1 are never used

_EMBEDDING = Module("token_embd", "decoder.embed_tokens", ("vocab", "embd"))
_HEAD = Module("output", "lm_head", ("vocab", "embd"))
_OUTPUT_NORM = Module("output_norm", "decoder.final_layer_norm", ("embd",), bias=True)
_LAYER = (
    Module("attn_norm", "self_attn_layer_norm", ("embd",), bias=True),
    Module("attn_q", "self_attn.q_proj", ("embd", "embd"), bias=True),
    Module("attn_k", "self_attn.k_proj", ("embd", "embd"), bias=True),
    Module("attn_v", "self_attn.v_proj", ("embd", "embd"), bias=True),
    Module("attn_output", "self_attn.out_proj", ("embd", "embd"), bias=True),
    Module("ffn_norm", "final_layer_norm", ("embd",), bias=True),
    Module("ffn_up", "fc1", ("ff", "embd"), bias=True),
    Module("ffn_down", "fc2", ("embd", "ff"), bias=True),
)

# config.json key, the one value (also HF's default) that `opt` files can express, what else means
_FIXED = (
    ("do_layer_norm_before", True, "the layer norms come after attention and MLP, as in opt-350m"),
    ("_remove_final_layer_norm", False, "there is no layer norm before the head"),
    ("activation_function", "relu", "the MLP does not use ReLU"),
    ("enable_bias", True, "the projections have no biases"),
    ("layer_norm_elementwise_affine", True, "the layer norms have no weights"),
)


def _metadata(config: Config) -> Metadata:
    check_fixed("opt", config, _FIXED)
    width = dimension(config, "hidden_size")
    heads = dimension(config, "num_attention_heads")
    projected = config.get("word_embed_proj_dim", width)
    if projected != width:
        raise refuse(
            "opt",
            "word_embed_proj_dim",
            projected,
            f"embeddings are projected to hidden_size {width}",
        )
    head_size("opt", config)
    return {
        "context_length": dimension(config, "max_position_embeddings"),
        "embedding_length": width,
        "block_count": dimension(config, "num_hidden_layers"),
        "feed_forward_length": dimension(config, "ffn_dim"),
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "attention.layer_norm_epsilon": _LAYER_NORM_EPSILON,
        "vocab_size": dimension(config, "vocab_size"),
    }


def _tensors(config: Config) -> Iterator[TensorSpec]:
    sizes = {
        "vocab": dimension(config, "vocab_size"),
        "embd": dimension(config, "hidden_size"),
        "ff": dimension(config, "ffn_dim"),
    }
    yield from _EMBEDDING.tensors(sizes)
    n_rows = _POSITION_OFFSET + dimension(config, "max_position_embeddings")
    yield TensorSpec(
        "position_embd.weight",
        "decoder.embed_positions.weight",
        (n_rows, sizes["embd"]),
        rows=(_POSITION_OFFSET, n_rows),
    )
    for i in range(dimension(config, "num_hidden_layers")):
        for module in _LAYER:
            yield from module.in_layer(i, "decoder.layers").tensors(sizes)
    yield from _OUTPUT_NORM.tensors(sizes)
    if not flag(config, "tie_word_embeddings", True):
        yield from _HEAD.tensors(sizes)


OPT = Family(
    architecture="opt",
    base_prefix="model.",
    metadata=_metadata,
    tensors=_tensors,
    # The head of a tied checkpoint repeats the embedding; fairseq left a version number behind.
    ignored=re.compile(r"lm_head\.weight|decoder\.version"),
    add_bos=True,
    control_tokens=frozenset({"<s>", "<pad>", "</s>", "<unk>"}),
)
