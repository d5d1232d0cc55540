"""The OPT family (Zhang et al. 2022, `OPTForCausalLM`) as GGUF architecture `opt`.

ggml has no official `opt`; the names are those of its forks (SparkInfer, llama.cpp PR 13799).
"""

import re

from h2o_cpp.convert.config import Config, Metadata, dimension, refuse
from h2o_cpp.convert.family import Family, Module
from h2o_cpp.convert.sizes import Sizes

_POSITION_OFFSET = 2  # HF reads position p from row p + 2; rows 0 and 1 are unused

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

_FIXED = (
    ("do_layer_norm_before", True, "the layer norms come after attention and MLP, as in opt-350m"),
    ("_remove_final_layer_norm", False, "there is no layer norm before the head"),
    ("activation_function", "relu", "the MLP does not use ReLU"),
    ("enable_bias", True, "the projections have no biases"),
    ("layer_norm_elementwise_affine", True, "the layer norms have no weights"),
)


def _check_embedding(config: Config, sizes: Sizes) -> Metadata:
    projected = config.get("word_embed_proj_dim", sizes["embd"])
    if projected != sizes["embd"]:
        why = f"embeddings are projected to hidden_size {sizes['embd']}"
        raise refuse("opt", "word_embed_proj_dim", projected, why)
    return {}


def _position_sizes(config: Config) -> Sizes:
    n_rows = _POSITION_OFFSET + dimension(config, "max_position_embeddings")
    return {"first_position": _POSITION_OFFSET, "position_rows": n_rows}


OPT = Family(
    architecture="opt",
    layer=lambda config, index: _LAYER,
    fixed=_FIXED,
    details=_check_embedding,
    rotated=None,
    layers="decoder.layers",
    embeddings=(
        Module("token_embd", "decoder.embed_tokens", ("vocab", "embd")),
        Module(
            "position_embd",
            "decoder.embed_positions",
            ("position_rows", "embd"),
            rows=("first_position", "position_rows"),
        ),
    ),
    output_norm=Module("output_norm", "decoder.final_layer_norm", ("embd",), bias=True),
    tied=True,
    more_sizes=_position_sizes,
    ignored=re.compile(r"decoder\.version"),  # of fairseq
    add_bos=True,
    control_tokens=frozenset({"<s>", "<pad>", "</s>", "<unk>"}),
)

FAMILIES = {"OPTForCausalLM": OPT}
