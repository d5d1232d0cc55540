"""Mixtures of experts whose scores may be sigmoids, or biased for the selection.

All have the layout of Llama's checkpoints.

ERNIE 4.5 is GGUF architecture `ernie4_5-moe`, GLM-4.5 to 4.7 and Solar Open `glm4moe`, dots.llm1
`dots1`, MiniMax M2 `minimax-m2`, K-EXAONE `exaone-moe`, the first DeepSeek-MoE `deepseek`, Ling and
Ring `bailingmoe` and, from 2.0, `bailingmoe2`.
"""

import re
from collections.abc import Iterator

from h2o_cpp.convert.config import Config, Fixed, Metadata, dimension, refuse
from h2o_cpp.convert.llama_layout import LlamaLayout, pairs_from_halves
from h2o_cpp.convert.modules import (
    MIXTRAL_EXPERTS,
    Mixture,
    Module,
    count,
    gated_mlp,
    listed_predictor,
    qkv,
    separate_predictor,
)
from h2o_cpp.convert.window import sliding_layers, window_of_pattern


def _experts_to_the_end(config: Config) -> Metadata:
    last = dimension(config, "num_hidden_layers") - 1
    if config.get("moe_layer_end_index", -1) not in (-1, last):
        end = config["moe_layer_end_index"]
        raise refuse("ernie4_5-moe", "moe_layer_end_index", end, "the last layers have no experts")
    return {}


def _no_window(config: Config) -> Metadata:
    n_layers = dimension(config, "num_hidden_layers")
    if config.get("layer_types") is not None:
        slides = any(sliding_layers(config))
    else:
        slides = config.get("sliding_window") is not None and config["max_window_layers"] < n_layers
    if slides:
        raise refuse("dots1", "sliding_window", config["sliding_window"], "some layers have one")
    return {}


def check_layer_types(architecture: str, config: Config) -> None:
    """Raise ValueError if layers other than the first have no experts."""
    n_layers = dimension(config, "num_hidden_layers")
    n_dense = count(config, "first_k_dense_replace")
    kinds = ["dense" if i < n_dense else "sparse" for i in range(n_layers)]
    if config.get("mlp_layer_types", kinds) not in (kinds, None):
        found = config["mlp_layer_types"]
        raise refuse(architecture, "mlp_layer_types", found, "more than the first have no experts")


def _k_exaone(config: Config) -> Metadata:
    check_layer_types("exaone-moe", config)
    return {} if config.get("sliding_window") is None else window_of_pattern(config, period=4)


def _k_exaone_predicting_layer(_config: Config) -> Iterator[Module]:
    """The layer for multi-token prediction, which has no experts."""
    yield from qkv()
    yield Module("attn_q_norm", "self_attn.q_norm", ("head",))
    yield Module("attn_k_norm", "self_attn.k_norm", ("head",))
    yield Module("attn_output", "self_attn.o_proj", ("embd", "q"))
    yield Module("attn_norm", "input_layernorm", ("embd",))
    yield Module("ffn_norm", "post_attention_layernorm", ("embd",))
    yield from gated_mlp("mlp")


_SHARED = Mixture(
    n_shared="n_shared_experts",
    n_dense="first_k_dense_replace",
    scale="routed_scaling_factor",
)
_SIGMOID = _SHARED._replace(sigmoid=True, bias="mlp.gate.e_score_correction_bias")
_ONE_GROUP: Fixed = (
    ("n_group", 1, "experts are in groups"),
    ("norm_topk_prob", False, "the weights of a token's experts sum to 1"),
    ("moe_layer_freq", 1, "some layers have no experts"),
    ("scoring_func", "softmax", "scores are not a softmax"),
)

_ERNIE = LlamaLayout(  # rotates pairs in its checkpoints, too
    "ernie4_5-moe",
    mixture=_SHARED._replace(
        normalized=True,
        says_normalized=False,
        n_shared="moe_num_shared_experts",
        says_shared_ff=True,
        n_dense="moe_layer_start_index",
        scale="",
        bias="mlp.moe_statics.e_score_correction_bias",
        bias_shape=("one", "experts"),
    ),
    fixed=(
        ("use_bias", False, "there are biases"),
        ("moe_layer_interval", 1, "some layers have no experts"),
    ),
    more=lambda config: _experts_to_the_end(config) | {"interleave_moe_layer_step": 1},
    tied=True,
    absent={
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 2,
    },
    ignored=re.compile(
        r"mtp_(block|emb_norm|hidden_norm|linear_proj)\..*"
        r"|layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    ),
)
_GLM4_MOE = LlamaLayout(
    "glm4moe",
    qkv_bias=None,
    output_bias=False,
    qk_norm="heads",
    qk_norm_key="use_qk_norm",
    partial=0.5,
    norms={"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
    mixture=_SIGMOID,
    absent={
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    predictor=listed_predictor(),
)
_SOLAR_OPEN = _GLM4_MOE._replace(
    qk_norm=None,
    partial=1.0,
    absent={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "head_dim": 128,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "intermediate_size": 1,  # of dense layers, which there are none of
    },
)
_DOTS1 = LlamaLayout(
    "dots1",
    qk_norm="heads",
    mixture=_SIGMOID,
    more=_no_window,
    absent={"sliding_window": 4096, "max_window_layers": 62},
)
_MINIMAX_M2 = LlamaLayout(
    "minimax-m2",
    qk_norm="whole",
    partial=1.0,
    mixture=MIXTRAL_EXPERTS._replace(
        says_ff=True, sigmoid=True, bias="block_sparse_moe.e_score_correction_bias"
    ),
    absent={"rope_theta": 5e6, "head_dim": 128},
)
_K_EXAONE = LlamaLayout(
    "exaone-moe",
    qk_norm="heads",
    mixture=_SIGMOID._replace(
        n_shared="num_shared_experts",
        says_shared_ff=True,
        bias="mlp.e_score_correction_bias",
    ),
    more=_k_exaone,
    absent={
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    ignored=re.compile(r"mtp\..*"),
    predictor=separate_predictor(_k_exaone_predicting_layer),
)
_DEEPSEEK = LlamaLayout(
    "deepseek",
    rotates_pairs=True,
    mixture=_SHARED,
    fixed=_ONE_GROUP,
    absent={"norm_topk_prob": False},
)


# Ling and Ring have Q, K and V in one tensor.
_QKV, _QKV_SHAPE = "attention.query_key_value", ("qkv", "embd")
_BAILING_OUTPUT = Module("attn_output", "attention.dense", ("embd", "q"))
_FIXED_BAILING: Fixed = (
    ("use_bias", False, "there are biases"),
    ("use_qkv_bias", False, "there are biases"),
    ("norm_head", False, "the output layer is normalized"),
)
_LING = LlamaLayout(
    "bailingmoe",
    embedding="word_embeddings",
    attention=(
        Module("attn_q", _QKV, _QKV_SHAPE, rows=("none", "q"), reorder=pairs_from_halves),
        Module("attn_k", _QKV, _QKV_SHAPE, rows=("q", "q_and_k"), reorder=pairs_from_halves),
        Module("attn_v", _QKV, _QKV_SHAPE, rows=("q_and_k", "qkv")),
        _BAILING_OUTPUT,
    ),
    mixture=_SHARED._replace(n_shared="num_shared_experts", scale=""),
    fixed=(*_FIXED_BAILING, ("first_k_dense_replace", 0, "some layers have no experts")),
)
_LING2 = LlamaLayout(
    "bailingmoe2",
    embedding="word_embeddings",
    attention=(
        Module("attn_qkv", _QKV, _QKV_SHAPE),
        Module("attn_q_norm", "attention.query_layernorm", ("head",)),
        Module("attn_k_norm", "attention.key_layernorm", ("head",)),
        _BAILING_OUTPUT,
    ),
    partial=1.0,
    mixture=_SIGMOID._replace(n_shared="num_shared_experts", bias="mlp.gate.expert_bias"),
    fixed=_FIXED_BAILING,
    predictor=listed_predictor(norm=("layer_output_norm", "final_layernorm")),
)


_LAYOUTS = {
    "Ernie4_5_MoeForCausalLM": _ERNIE,
    "Glm4MoeForCausalLM": _GLM4_MOE,
    "SolarOpenForCausalLM": _SOLAR_OPEN,
    "Dots1ForCausalLM": _DOTS1,
    "MiniMaxM2ForCausalLM": _MINIMAX_M2,
    "ExaoneMoeForCausalLM": _K_EXAONE,
    "ExaoneMoEForCausalLM": _K_EXAONE,
    "DeepseekForCausalLM": _DEEPSEEK,
    "BailingMoeForCausalLM": _LING,
    "BailingMoeV2ForCausalLM": _LING2,
}

FAMILIES = {name: layout.family() for name, layout in _LAYOUTS.items()}
