"""Older families with layer norms: OPT, GPT-NeoX, GPT-2, StarCoder, GPT-J, BLOOM, MPT, Falcon.

OPT (Zhang et al. 2022) is GGUF architecture `opt`, which ggml does not have; the names are those of
its forks (SparkInfer, llama.cpp PR 13799). GPT-NeoX (Pythia, GPT-NeoX-20B) is `gptneox`.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, Metadata, check_fixed, dimension, flag, number, refuse
from h2o_cpp.convert.family import Family, whole_head
from h2o_cpp.convert.modules import Module, Sizes, qkv
from h2o_cpp.convert.rope import rotated_share

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


def _norm(gguf: str, hf: str) -> Module:
    return Module(gguf, hf, ("embd",), bias=True)


# ---- OPT ----

_POSITION_OFFSET = 2  # HF reads position p from row p + 2; rows 0 and 1 are unused

_OPT_LAYER = (
    _norm("attn_norm", "self_attn_layer_norm"),
    *qkv(bias=True),
    Module("attn_output", "self_attn.out_proj", ("embd", "embd"), bias=True),
    _norm("ffn_norm", "final_layer_norm"),
    Module("ffn_up", "fc1", ("ff", "embd"), bias=True),
    Module("ffn_down", "fc2", ("embd", "ff"), bias=True),
)

_OPT_FIXED = (
    ("do_layer_norm_before", True, "the layer norms come after attention and MLP, as in opt-350m"),
    ("_remove_final_layer_norm", False, "there is no layer norm before the head"),
    ("activation_function", "relu", "the MLP does not use ReLU"),
    ("enable_bias", True, "the projections have no biases"),
    ("layer_norm_elementwise_affine", True, "the layer norms have no weights"),
)


def _check_opt_embedding(config: Config, sizes: Sizes) -> Metadata:
    projected = config.get("word_embed_proj_dim", sizes["embd"])
    if projected != sizes["embd"]:
        why = f"embeddings are projected to hidden_size {sizes['embd']}"
        raise refuse("opt", "word_embed_proj_dim", projected, why)
    return {}


def _opt_position_sizes(config: Config) -> Sizes:
    n_rows = _POSITION_OFFSET + dimension(config, "max_position_embeddings")
    return {"first_position": _POSITION_OFFSET, "position_rows": n_rows}


OPT = Family(
    architecture="opt",
    layer=lambda config, index: _OPT_LAYER,
    fixed=_OPT_FIXED,
    details=_check_opt_embedding,
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
    output_norm=_norm("output_norm", "decoder.final_layer_norm"),
    tied=True,
    more_sizes=_opt_position_sizes,
    ignored=re.compile(r"decoder\.version"),  # of fairseq
    add_bos=True,
    control_tokens=frozenset({"<s>", "<pad>", "</s>", "<unk>"}),
)

# ---- GPT-NeoX ----


def grouped_by_projection(values: Values, head_size: int) -> Values:
    """Permute rows from Q, K, V per head to all Q, all K, all V."""
    by_head: Values = values.reshape(-1, 3, head_size, *values.shape[1:])
    return np.reshape(by_head.swapaxes(0, 1), values.shape)


def _layer_with_grouped_qkv(attention: str) -> tuple[Module, ...]:
    """A layer of GPT-NeoX or BLOOM; `attention` is the HF name of its attention."""
    qkv_name = f"{attention}.query_key_value"
    return (
        _norm("attn_norm", "input_layernorm"),
        Module("attn_qkv", qkv_name, ("qkv", "embd"), bias=True, reorder=grouped_by_projection),
        Module("attn_output", f"{attention}.dense", ("embd", "embd"), bias=True),
        _norm("ffn_norm", "post_attention_layernorm"),
        Module("ffn_up", "mlp.dense_h_to_4h", ("ff", "embd"), bias=True),
        Module("ffn_down", "mlp.dense_4h_to_h", ("embd", "ff"), bias=True),
    )


_GPTNEOX_LAYER = _layer_with_grouped_qkv("attention")


def _gptneox_details(config: Config, sizes: Sizes) -> Metadata:
    parallel = flag(config, "use_parallel_residual", True)
    return {"use_parallel_residual": parallel, **gelu_form("gptneox", config, "hidden_act", "gelu")}


GPTNEOX = Family(
    architecture="gptneox",
    layer=lambda config, index: _GPTNEOX_LAYER,
    fixed=(
        ("attention_bias", True, "the attention has no biases"),
        ("tie_word_embeddings", False, "the head repeats the embedding"),
    ),
    details=_gptneox_details,
    # rotary_pct: before transformers 5
    rotated=lambda config, sizes: rotated_share(
        "gptneox", config, sizes["head"], 0.25, "rotary_pct"
    ),
    base_prefix="gpt_neox.",
    embeddings=(Module("token_embd", "embed_in", ("vocab", "embd")),),
    output_norm=_norm("output_norm", "final_layer_norm"),
    head=Module("output", "embed_out", ("vocab", "embd")),
    # Old checkpoints have causal masks, masked values and frequencies.
    ignored=re.compile(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)

# ---- GPT-2 ----

_GPT2_LAYER = (
    _norm("attn_norm", "ln_1"),
    Module("attn_qkv", "attn.c_attn", ("qkv", "embd"), bias=True, transposed=True),
    Module("attn_output", "attn.c_proj", ("embd", "embd"), bias=True, transposed=True),
    _norm("ffn_norm", "ln_2"),
    Module("ffn_up", "mlp.c_fc", ("ff", "embd"), bias=True, transposed=True),
    Module("ffn_down", "mlp.c_proj", ("embd", "ff"), bias=True, transposed=True),
)

GPT2 = Family(
    architecture="gpt2",
    layer=lambda config, index: _GPT2_LAYER,
    fixed=(
        ("scale_attn_weights", True, "attention is not scaled"),
        ("scale_attn_by_inverse_layer_idx", False, "attention is scaled by the layer"),
        ("add_cross_attention", False, "there is attention to an encoder"),
    ),
    details=lambda config, sizes: gelu_form("gpt2", config, "activation_function", "gelu_new"),
    epsilon=("layer_norm_epsilon", 1e-5),
    rotated=None,
    base_prefix="transformer.",
    layers="h",
    embeddings=(
        Module("token_embd", "wte", ("vocab", "embd")),
        Module("position_embd", "wpe", ("context", "embd")),
    ),
    output_norm=_norm("output_norm", "ln_f"),
    tied=True,
    defaults={"ff_ratio": 4, "context": 1024},
    # Old checkpoints have causal masks.
    ignored=re.compile(r"h\.\d+\.attn\.(bias|masked_bias|embed_positions)"),
)

# ---- StarCoder ----

STARCODER = replace(
    GPT2,
    architecture="starcoder",
    layer=lambda config, index: (module._replace(transposed=False) for module in _GPT2_LAYER),
    fixed=(
        ("scale_attn_weights", True, "attention is not scaled"),
        ("multi_query", True, "each query head has its own KV head"),
        ("add_cross_attention", False, "there is attention to an encoder"),
    ),
    details=lambda config, sizes: gelu_form(
        "starcoder", config, "activation_function", "gelu_pytorch_tanh"
    ),
    kv_heads=lambda config: 1,
)

# ---- GPT-J ----

_GPTJ_LAYER = (
    _norm("attn_norm", "ln_1"),
    Module("attn_q", "attn.q_proj", ("embd", "embd")),
    Module("attn_k", "attn.k_proj", ("embd", "embd")),
    Module("attn_v", "attn.v_proj", ("embd", "embd")),
    Module("attn_output", "attn.out_proj", ("embd", "embd")),
    Module("ffn_up", "mlp.fc_in", ("ff", "embd"), bias=True),
    Module("ffn_down", "mlp.fc_out", ("embd", "ff"), bias=True),
)


def _gptj_rotated(config: Config, sizes: Sizes) -> int:
    rotated, head = dimension(config, "rotary_dim", 64), sizes["head"]
    if rotated % 2 or rotated > head:
        why = f"{rotated} of {head} dimensions of a head would be rotated"
        raise refuse("gptj", "rotary_dim", rotated, why)
    return rotated


GPTJ = replace(
    GPT2,
    architecture="gptj",
    layer=lambda config, index: _GPTJ_LAYER,
    fixed=(),
    details=lambda config, sizes: gelu_form("gptj", config, "activation_function", "gelu_new"),
    rotated=_gptj_rotated,
    embeddings=(Module("token_embd", "wte", ("vocab", "embd")),),
    head=Module("output", "lm_head", ("vocab", "embd"), bias=True),
    tied=False,
    defaults={"ff_ratio": 4, "context": 2048},
)

# ---- BLOOM ----

_BLOOM_LAYER = _layer_with_grouped_qkv("self_attention")
_WORDS = Module("token_embd", "word_embeddings", ("vocab", "embd"))

BLOOM = replace(
    GPT2,
    architecture="bloom",
    layer=lambda config, index: _BLOOM_LAYER,
    fixed=(("apply_residual_connection_post_layernorm", False, "the residual is normalized"),),
    details=lambda config, sizes: {},
    embeddings=(_WORDS, _norm("token_embd_norm", "word_embeddings_layernorm")),
    defaults={"ff_ratio": 4, "context": 2048},
)

# ---- MPT ----

_MPT_LAYER = (
    Module("attn_norm", "norm_1", ("embd",)),
    Module("attn_qkv", "attn.Wqkv", ("qkv", "embd")),
    Module("attn_output", "attn.out_proj", ("embd", "embd")),
    Module("ffn_norm", "norm_2", ("embd",)),
    Module("ffn_up", "ffn.up_proj", ("ff", "embd")),
    Module("ffn_down", "ffn.down_proj", ("embd", "ff")),
)


def _mpt_details(config: Config, sizes: Sizes) -> Metadata:
    attention = config.get("attn_config") or {}
    fixed = (
        ("attn_type", "multihead_attention", "query heads share KV heads"),
        ("softmax_scale", None, "attention is scaled differently"),
        ("prefix_lm", False, "tokens attend to later ones"),
        ("qk_ln", False, "q and k are normalized"),
        ("alibi", True, "positions are learned"),
    )
    check_fixed("mpt", attention, fixed)
    bias = number(attention, "alibi_bias_max", 8)
    values: Metadata = {"attention.max_alibi_bias": bias, "h2o.activation": "gelu_erf"}
    if attention.get("clip_qkv") is not None:
        values["attention.clamp_kqv"] = number(attention, "clip_qkv")
    return values


MPT = replace(
    GPT2,
    architecture="mpt",
    layer=lambda config, index: _MPT_LAYER,
    fixed=(
        ("expansion_ratio", 4, "the MLP has another size"),
        ("logit_scale", None, "logits are scaled"),
        ("no_bias", True, "there are biases"),
    ),
    details=_mpt_details,
    layers="blocks",
    embeddings=(Module("token_embd", "wte", ("vocab", "embd")),),
    output_norm=Module("output_norm", "norm_f", ("embd",)),
    defaults={"ff_ratio": 4, "context": 2048},
)

# ---- Falcon ----


def _falcon_kv_heads(config: Config) -> int | None:
    if flag(config, "new_decoder_architecture", False):
        return None if config.get("num_kv_heads") is None else dimension(config, "num_kv_heads")
    return 1 if flag(config, "multi_query", True) else None


def _falcon_layer(config: Config, index: int) -> Iterator[Module]:
    new = flag(config, "new_decoder_architecture", False)
    if new and config.get("num_ln_in_parallel_attn") in (None, 2):
        yield _norm("attn_norm", "ln_mlp")
        yield _norm("attn_norm_2", "ln_attn")
    else:
        yield _norm("attn_norm", "input_layernorm")
    kv_heads = FALCON.sizes(config)["kv_heads"]

    def by_projection(values: Values, head_size: int) -> Values:
        """Rows of the queries of a group, its key and its value -> all Q, all K, all V."""
        groups = values.reshape(kv_heads, -1, head_size, values.shape[-1])
        parts = groups[:, :-2], groups[:, -2], groups[:, -1]
        return np.concatenate([part.reshape(-1, values.shape[-1]) for part in parts])

    qkv = "self_attention.query_key_value"
    yield Module("attn_qkv", qkv, ("qkv", "embd"), reorder=by_projection)
    yield Module("attn_output", "self_attention.dense", ("embd", "embd"))
    yield Module("ffn_up", "mlp.dense_h_to_4h", ("ff", "embd"))
    yield Module("ffn_down", "mlp.dense_4h_to_h", ("embd", "ff"))


FALCON = replace(
    BLOOM,
    architecture="falcon",
    layer=_falcon_layer,
    fixed=(
        ("alibi", False, "attention falls with the distance (ALiBi)"),
        ("bias", False, "the projections have biases"),
        ("parallel_attn", True, "attention and MLP come one after the other"),
    ),
    details=lambda config, sizes: gelu_form("falcon", config, "activation", "gelu"),
    rotated=whole_head,
    embeddings=(_WORDS,),
    kv_heads=_falcon_kv_heads,
)

FAMILIES = {
    "OPTForCausalLM": OPT,
    "GPTNeoXForCausalLM": GPTNEOX,
    "GPT2LMHeadModel": GPT2,
    "GPTBigCodeForCausalLM": STARCODER,
    "GPTJForCausalLM": GPTJ,
    "BloomForCausalLM": BLOOM,
    "MPTForCausalLM": MPT,  # with its authors' code
    "MptForCausalLM": MPT,
    "FalconForCausalLM": FALCON,
}
