"""Families of Llama's layout.

Llama 1 to 3.2, Mistral and Mixtral are GGUF architecture `llama`, Qwen2 and 2.5 `qwen2`, Qwen3
`qwen3`; those with experts `qwen2moe`, `qwen3moe` and `olmoe`; OLMo 2 and 3 `olmo2`.
"""

from dataclasses import replace

from h2o_cpp.convert.config import Config, Metadata, dimension, number, refuse
from h2o_cpp.convert.llama_layout import LlamaLayout
from h2o_cpp.convert.modules import EVERY_LAYER, MIXTRAL_EXPERTS, Mixture, Module
from h2o_cpp.convert.rope import rope_of_windows, rope_parameters, rope_sections
from h2o_cpp.convert.window import (
    window_if_used,
    window_of_every_layer,
    window_of_first_layers,
    window_of_last_layers,
    window_of_listed_layers,
    window_of_pattern,
    window_of_some_layers,
)

_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _mistral3(config: Config) -> Metadata:
    kind = config.get("model_type")
    if kind not in ("mistral", "ministral3"):
        raise refuse("mistral3", "model_type", kind, "the text model is another one")
    values, rope = window_of_every_layer(config), rope_parameters(config)
    if rope.get("llama_4_scaling_beta") is not None:
        values["attention.temperature_scale"] = number(rope, "llama_4_scaling_beta")
    return values


def _qwen_vl(config: Config) -> Metadata:
    return window_of_last_layers(config) | rope_sections(config)


def granite_scales(config: Config) -> Metadata:
    """The multipliers of Granite."""
    return {
        "embedding_scale": number(config, "embedding_multiplier", 1.0),
        "residual_scale": number(config, "residual_multiplier", 1.0),
        "attention.scale": number(config, "attention_multiplier", 1.0),
        "logit_scale": number(config, "logits_scaling", 1.0),
    }


def _smollm3(config: Config) -> Metadata:
    n_layers = dimension(config, "num_hidden_layers")
    check_unrotated("smollm3", config, "not every fourth layer is unrotated")
    return window_of_some_layers(config, [(i + 1) % 4 == 0 for i in range(n_layers)])


def check_unrotated(architecture: str, config: Config, why: str) -> None:
    """Raise ValueError, with the reason, unless every fourth layer is unrotated, and no other."""
    n_layers = dimension(config, "num_hidden_layers")
    key = "no_rope_layer_interval" if config.get("no_rope_layers") is None else "no_rope_layers"
    rotated = [int((i + 1) % 4 != 0) for i in range(n_layers)]
    expected = {"no_rope_layer_interval": 4, "no_rope_layers": rotated}
    if config.get(key, 4) != expected[key]:
        raise refuse(architecture, key, config[key], why)


def _olmo3(config: Config) -> Metadata:
    rope = rope_of_windows("olmo2", config, rope_parameters(config)["rope_theta"])
    return window_of_listed_layers(config, period=4) | rope


def _exaone4(config: Config) -> Metadata:
    return {} if config.get("sliding_window") is None else window_of_pattern(config, period=4)


def _gemma(config: Config) -> Metadata:
    activation = config.get("hidden_activation")
    if activation is None and config.get("hidden_act") != "gelu":
        # Gemma 1's first checkpoints say "gelu" for the form with tanh.
        activation = config.get("hidden_act")
    if activation not in ("gelu_pytorch_tanh", None):
        why = "the MLP does not use GELU's form with tanh"
        raise refuse("gemma", "hidden_activation", activation, why)
    return {}


def _gemma2(config: Config) -> Metadata:
    none = dict.fromkeys(_SOFTCAPS, 0.0)  # readers assume those of Gemma 2 where there are none
    return none | _gemma_scales(config) | window_of_listed_layers(config, period=2)


def _gemma3(config: Config) -> Metadata:
    return (
        _gemma_scales({**config, "attn_logit_softcapping": None})  # ignored, as in transformers
        | window_of_pattern(config, period=6)
        | rope_of_windows("gemma3", config)
    )


def _gemma_scales(config: Config) -> Metadata:
    values = _gemma(config)
    values["attention.scale"] = number(config, "query_pre_attn_scalar", 256) ** -0.5
    for key in _SOFTCAPS:
        if config.get(key) is not None:
            values[key] = number(config, key)
    return values


_LLAMA = LlamaLayout("llama", rotates_pairs=True, qkv_bias=None)
_MISTRAL = _LLAMA._replace(more=window_of_every_layer, absent={"sliding_window": 4096})
_MISTRAL3 = _LLAMA._replace(architecture="mistral3", more=_mistral3, absent={"rms_norm_eps": 1e-5})
_MIXTRAL = _MISTRAL._replace(
    mixture=MIXTRAL_EXPERTS, absent={"rope_theta": 1e6, "rms_norm_eps": 1e-5}
)
_GRANITE = _LLAMA._replace(
    architecture="granite",
    fixed=(
        ("attention_bias", False, "there are biases"),
        ("mlp_bias", False, "there are biases"),
    ),
    more=granite_scales,
)
GRANITE_EXPERTS = MIXTRAL_EXPERTS._replace(
    router="block_sparse_moe.router.layer", experts="block_sparse_moe", joined=True
)
_GRANITE_MOE = _GRANITE._replace(
    architecture="granitemoe",
    mixture=GRANITE_EXPERTS,
)
_ARCEE = _LLAMA._replace(architecture="arcee", activation="relu2", absent={"rms_norm_eps": 1e-5})
_SMOLLM3 = _LLAMA._replace(
    architecture="smollm3", more=_smollm3, tied=True, absent={"rope_theta": 2e6}
)

_QWEN2 = LlamaLayout("qwen2", qkv_bias=True, more=window_of_last_layers)
_QWEN2_VL = _QWEN2._replace(architecture="qwen2vl", more=_qwen_vl)
_QWEN2_MOE = _QWEN2._replace(
    architecture="qwen2moe",
    mixture=Mixture(shared=True),
    fixed=EVERY_LAYER,
    more=window_of_first_layers,
)
_QWEN3 = _QWEN2._replace(architecture="qwen3", qkv_bias=False, qk_norm="heads")
_QWEN3_VL = _QWEN3._replace(architecture="qwen3vl", more=_qwen_vl)
_QWEN3_MOE = _QWEN3._replace(
    architecture="qwen3moe",
    mixture=Mixture(normalized=True),
    fixed=EVERY_LAYER,
    more=window_if_used,
)
_OLMOE = LlamaLayout(
    "olmoe",
    qk_norm="whole",
    mixture=Mixture(ff="intermediate_size", says_ff=False),
    fixed=(("clip_qkv", None, "q, k and v are clamped"),),
    absent={"rms_norm_eps": 1e-5},
)
_FUSED_MLP = (
    Module("ffn_up", "mlp.gate_up_proj", ("gate_and_up", "embd")),
    Module("ffn_down", "mlp.down_proj", ("embd", "ff")),
)
_PHI3 = LlamaLayout(
    "phi3",
    attention=(
        Module("attn_qkv", "self_attn.qkv_proj", ("qkv", "embd")),
        Module("attn_output", "self_attn.o_proj", ("embd", "q")),
    ),
    mlp=_FUSED_MLP,
    partial=1.0,
    more=window_of_every_layer,
    absent={"rms_norm_eps": 1e-5},
)
_GEMMA = LlamaLayout(
    "gemma",
    gemma=True,
    fixed=(("use_bidirectional_attention", False, "tokens attend to later ones"),),
    more=_gemma,
    tied=True,
)
_GEMMA2 = _GEMMA._replace(
    architecture="gemma2",
    norms={
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    more=_gemma2,
    absent={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)
_GEMMA3 = _GEMMA2._replace(
    architecture="gemma3",
    qk_norm="heads",
    more=_gemma3,
    absent={
        "rope_theta": 1e6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
    },
)


# Layers whose outputs are normalized, and not their inputs.
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OLMO2 = LlamaLayout(
    "olmo2",
    qk_norm="whole",
    norms=_POST_NORMS,
    absent={"rms_norm_eps": 1e-5},
)
_OLMO3 = _OLMO2._replace(more=_olmo3, absent={"rms_norm_eps": 1e-5, "rope_theta": 500000.0})
_EXAONE4 = _OLMO2._replace(architecture="exaone4", qk_norm="heads", more=_exaone4)
# Pairs are rotated in its checkpoints, too.
_GLM = LlamaLayout(
    "chatglm",
    qkv_bias=None,
    output_bias=False,
    mlp=_FUSED_MLP,
    partial=0.5,
    absent={"attention_bias": True, "rms_norm_eps": 1.5625e-7},
)
_GLM4 = _GLM._replace(
    architecture="glm4",
    norms={
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
)
_ERNIE = LlamaLayout(  # the same
    "ernie4_5",
    fixed=(("use_bias", False, "there are biases"),),
    tied=True,
    absent={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "head_dim": 128},
)
_SEED = LlamaLayout(
    "seed_oss",
    qkv_bias=None,
    output_bias=False,
    norms={"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
    fixed=(
        ("attention_out_bias", False, "there are biases"),
        ("mlp_bias", False, "there are biases"),
    ),
    absent={"attention_bias": True},
)


_LAYOUTS = {
    "LlamaForCausalLM": _LLAMA,
    "LLaMAForCausalLM": _LLAMA,  # first checkpoints of Llama 1
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": _MISTRAL3,
    "Ministral3ForCausalLM": _MISTRAL3,
    "MixtralForCausalLM": _MIXTRAL,
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "ArceeForCausalLM": _ARCEE,
    "SmolLM3ForCausalLM": _SMOLLM3,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2MoeForCausalLM": _QWEN2_MOE,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": _OLMO3,
    "OlmoeForCausalLM": _OLMOE,
    "Exaone4ForCausalLM": _EXAONE4,
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM4,
    "Ernie4_5ForCausalLM": _ERNIE,
    "SeedOssForCausalLM": _SEED,
    "Phi3ForCausalLM": _PHI3,
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma3TextModel": _GEMMA3,
}

# EmbeddingGemma: Gemma 3 whose tokens attend to later ones too.
GEMMA_EMBEDDING = replace(
    _GEMMA3._replace(
        architecture="gemma-embedding",
        fixed=(),
        more=lambda config: {**_gemma3(config), "attention.causal": False},
    ).family(),
    head=None,
)

FAMILIES = {name: layout.family() for name, layout in _LAYOUTS.items()}
