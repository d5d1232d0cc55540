"""Families with multi-head latent attention.

DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash are GGUF architecture `deepseek2`, Mistral Small 4 is
`mistral4`, MiniCPM3 `minicpm3`. Except for the last, files have the matrix of keys and values as
two, by head, of which that of keys is transposed, so that queries and outputs can be multiplied
instead of all keys and values.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, Metadata, dimension, refuse
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.llama_likes import minicpm_scales
from h2o_cpp.convert.mixtures import check_layer_types
from h2o_cpp.convert.modules import (
    Mixture,
    Module,
    Sizes,
    TensorSpec,
    count,
    gated_mlp,
    listed_predictor,
)
from h2o_cpp.convert.rope import rope_parameters

_EXPERTS = Mixture(
    n_shared="n_shared_experts",
    n_dense="first_k_dense_replace",
    scale="routed_scaling_factor",
)
_SIGMOID = _EXPERTS._replace(sigmoid=True, bias="mlp.gate.e_score_correction_bias")


def _query_size(config: Config) -> int:
    return dimension(config, "qk_nope_head_dim") + dimension(config, "qk_rope_head_dim")


def _sizes(config: Config) -> Sizes:
    heads, rank = dimension(config, "num_attention_heads"), dimension(config, "kv_lora_rank")
    return {
        "kv_a": rank + dimension(config, "qk_rope_head_dim"),
        "kv_rank": rank,
        "q_rank": count(config, "q_lora_rank"),
        "v": heads * dimension(config, "v_head_dim"),
    }


def _details(config: Config, sizes: Sizes) -> Metadata:
    check_layer_types("deepseek2", config)
    method = config.get("topk_method", "greedy")
    if method == "group_limited_greedy" and count(config, "n_group") > 1:  # as in DeepSeek V2
        raise refuse("deepseek2", "topk_method", method, "a group is as good as its best expert")
    values: Metadata = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": sizes["kv_rank"],
        "attention.key_length": sizes["kv_a"],
        "attention.value_length": sizes["kv_rank"],
        "attention.key_length_mla": sizes["head"],
        "attention.value_length_mla": sizes["v"] // sizes["heads"],
    }
    beta = rope_parameters(config).get("llama_4_scaling_beta")
    if beta is not None:  # of Mistral Small 4
        values["attention.temperature_scale"] = float(beta)
    if sizes["q_rank"]:
        values["attention.q_lora_rank"] = sizes["q_rank"]
    return values


def _layer(mixture: Mixture | None, config: Config, index: int) -> Iterator[Module]:
    yield Module("attn_norm", "input_layernorm", ("embd",))
    if count(config, "q_lora_rank"):
        yield Module("attn_q_a", "self_attn.q_a_proj", ("q_rank", "embd"))
        yield Module("attn_q_a_norm", "self_attn.q_a_layernorm", ("q_rank",))
        yield Module("attn_q_b", "self_attn.q_b_proj", ("q", "q_rank"))
    else:
        yield Module("attn_q", "self_attn.q_proj", ("q", "embd"))
    yield Module("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", ("kv_a", "embd"))
    yield Module("attn_kv_a_norm", "self_attn.kv_a_layernorm", ("kv_rank",))
    yield Module("attn_output", "self_attn.o_proj", ("embd", "v"))
    yield Module("ffn_norm", "post_attention_layernorm", ("embd",))
    if mixture is None or index < mixture.dense_layers(config):
        yield from gated_mlp("mlp")
    else:
        yield from mixture.modules(config)


def _keys_and_values(config: Config, index: int, sizes: Sizes) -> Iterator[TensorSpec]:
    heads, rank = sizes["heads"], sizes["kv_rank"]
    v, plain = sizes["v"] // heads, dimension(config, "qk_nope_head_dim")

    def keys(values: Values) -> Values:
        each: Values = values.reshape(heads, plain + v, rank)[:, :plain]
        return np.ascontiguousarray(each.swapaxes(1, 2))

    def values_of(values: Values) -> Values:
        return np.ascontiguousarray(values.reshape(heads, plain + v, rank)[:, plain:])

    hf, shape = f"layers.{index}.self_attn.kv_b_proj.weight", (heads * (plain + v), rank)
    for part, transform, written in (
        ("k", keys, (heads, rank, plain)),
        ("v", values_of, (heads, v, rank)),
    ):
        yield TensorSpec(
            f"blk.{index}.attn_{part}_b.weight", hf, shape, transform=transform, written=written
        )


def _family(mixture: Mixture, absent: Config, architecture: str = "deepseek2") -> Family:
    return Family(
        architecture=architecture,
        layer=lambda config, index: _layer(mixture, config, index),
        fixed=(
            ("hidden_act", "silu", "the MLP does not use SiLU"),
            ("attention_bias", False, "the attention has biases"),
            ("mlp_bias", False, "the MLP has biases"),
            ("moe_layer_freq", 1, "some layers have no experts"),
            ("rope_interleave", True, "halves of a head are rotated"),
        ),
        details=lambda config, sizes: _details(config, sizes),
        epsilon=("rms_norm_eps", 1e-6),
        rms=True,
        rotated=lambda config, sizes: dimension(config, "qk_rope_head_dim"),
        kv_heads=lambda config: dimension(config, "num_attention_heads"),
        head_size=_query_size,
        more_sizes=_sizes,
        more_tensors=_keys_and_values,
        mixture=mixture,
        absent=absent,
        predictor=listed_predictor(),
    )


_V2 = _family(_EXPERTS, {"norm_topk_prob": False})
_V3 = _family(_SIGMOID, {"norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 3})
_GLM = _family(
    _SIGMOID, {"norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 1}
)

_MISTRAL = _family(
    _EXPERTS,
    {"norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 0},
    "mistral4",
)


def _minicpm3_layer(config: Config, index: int) -> Iterator[Module]:
    yield from _layer(None, config, index)
    yield Module("attn_kv_b", "self_attn.kv_b_proj", ("kv_b", "kv_rank"))


def _minicpm3_sizes(config: Config) -> Sizes:
    plain = dimension(config, "num_attention_heads") * dimension(config, "qk_nope_head_dim")
    if config.get("v_head_dim") is None:
        heads = dimension(config, "num_attention_heads")
        config = {**config, "v_head_dim": dimension(config, "hidden_size") // heads}
    sizes = _sizes(config)
    return {**sizes, "kv_b": plain + sizes["v"]}


def _minicpm3_details(config: Config, sizes: Sizes) -> Metadata:
    return minicpm_scales(config) | {
        "attention.q_lora_rank": sizes["q_rank"],
        "attention.kv_lora_rank": sizes["kv_rank"],
        "attention.key_length": sizes["head"],
        "attention.value_length": sizes["v"] // sizes["heads"],
    }


_MINICPM3 = replace(
    _V2,
    architecture="minicpm3",
    layer=_minicpm3_layer,
    details=_minicpm3_details,
    more_sizes=_minicpm3_sizes,
    more_tensors=lambda config, index, sizes: (),
    fixed=tuple(row for row in _V2.fixed if row[0] != "rope_interleave"),
    epsilon=("rms_norm_eps", 1e-5),
    mixture=None,
    tied=True,
    absent={},
    predictor=None,
)

FAMILIES = {
    "DeepseekV2ForCausalLM": _V2,
    "DeepseekV3ForCausalLM": _V3,
    "KimiK2ForCausalLM": _V3,
    "Glm4MoeLiteForCausalLM": _GLM,
    "Mistral4ForCausalLM": _MISTRAL,
    "MiniCPM3ForCausalLM": _MINICPM3,
}
