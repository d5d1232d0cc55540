"""Families of Llama's layout: RMS norms, gated MLP, rotary positions.

Llama 1 to 3.2, Mistral and Mixtral are GGUF architecture `llama`, Qwen2 and 2.5 `qwen2`, Qwen3
`qwen3`; those with experts `qwen2moe`, `qwen3moe` and `olmoe`; OLMo 2 and 3 `olmo2`.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, Metadata, check_fixed, dimension, flag, number, refuse
from h2o_cpp.convert.experts import (
    GRANITE_EXPERTS,
    MIXTRAL_EXPERTS,
    OLMOE_EXPERTS,
    QWEN2_EXPERTS,
    QWEN3_EXPERTS,
    Mixture,
)
from h2o_cpp.convert.family import Family, Module
from h2o_cpp.convert.rope import local_rope, rope_parameters, rope_sections, rotated_share
from h2o_cpp.convert.sizes import Sizes
from h2o_cpp.convert.window import (
    window_if_used,
    window_of_every_layer,
    window_of_first_layers,
    window_of_last_layers,
    window_of_listed_layers,
    window_of_some_layers,
)


class _Variant(NamedTuple):
    """The differences between the architectures."""

    architecture: str
    rotates_pairs: bool
    """Whether adjacent dimensions (2i, 2i + 1) are rotated, rather than (i, i + head_size / 2) as
    in the checkpoint."""
    qkv_bias: bool | None
    """Whether Q, K and V have biases; None: if attention_bias is true."""
    output_bias: bool = True
    """Whether attention_bias is for the attention's output, too."""
    qk_norm: str | None = None
    """Whether Q and K are normalized: "heads" or "whole"."""
    mixture: Mixture | None = None
    """The experts, instead of one MLP."""
    more: Callable[[Config], Metadata] = lambda config: {}
    """Further metadata, such as windows. Raises ValueError for what GGUF cannot express."""
    fused_qkv: bool = False
    """Whether Q, K and V are one tensor."""
    fused_mlp: bool = False
    """Whether gate and up are one tensor."""
    partial: float | None = None
    """The default share of a head that is rotated; None: all of it, always."""
    gemma: bool = False
    """Whether 1 is added to norm weights, and the MLP uses GELU."""
    norms: Mapping[str, str] = MappingProxyType(
        {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    )
    """The norms of a layer: name in the file -> in the checkpoint."""
    tied: bool = False
    """Whether the head is the embedding, unless config.json says otherwise."""
    absent: Config = MappingProxyType({})
    """HF's values of keys that config.json may lack: see Family."""


def _mistral3(config: Config) -> Metadata:
    kind = config.get("model_type")
    if kind not in ("mistral", "ministral3"):
        raise refuse("mistral3", "model_type", kind, "the text model is another one")
    scale = rope_parameters(config).get("llama_4_scaling_beta")
    scaled = {} if scale is None else {"attention.temperature_scale": number({"": scale}, "")}
    return window_of_every_layer(config) | scaled


def _qwen_vl(config: Config) -> Metadata:
    return window_of_last_layers(config) | rope_sections(config)


def _granite(config: Config) -> Metadata:
    fixed = [(key, False, "there are biases") for key in ("attention_bias", "mlp_bias")]
    check_fixed("granite", config, fixed)
    return {
        "embedding_scale": number(config, "embedding_multiplier", 1.0),
        "residual_scale": number(config, "residual_multiplier", 1.0),
        "attention.scale": number(config, "attention_multiplier", 1.0),
        "logit_scale": number(config, "logits_scaling", 1.0),
    }


def _smollm3(config: Config) -> Metadata:
    n_layers = dimension(config, "num_hidden_layers")
    fourth = [(i + 1) % 4 == 0 for i in range(n_layers)]
    key = "no_rope_layer_interval" if config.get("no_rope_layers") is None else "no_rope_layers"
    expected = {"no_rope_layer_interval": 4, "no_rope_layers": [int(not last) for last in fourth]}
    if config.get(key, 4) != expected[key]:
        raise refuse("smollm3", key, config[key], "not every fourth layer is unrotated")
    return window_of_some_layers(config, fourth)


def _olmo3(config: Config) -> Metadata:
    local = local_rope(config, rope_parameters(config)["rope_theta"])
    if local["rope_type"] != "default":
        raise refuse("olmo2", "rope_type", local["rope_type"], "windows have scaled positions")
    window = window_of_listed_layers(config, period=4)
    return window | {"rope.freq_base_swa": number(local, "rope_theta")}


def _exaone4(config: Config) -> Metadata:
    if config.get("sliding_window") is None:
        return {}
    pattern = config.get("sliding_window_pattern", 4)
    period = len(pattern) if isinstance(pattern, str) else pattern  # "LLLG" is 4
    return window_of_listed_layers(config, period=4, default_period=period)


def _ernie(config: Config) -> Metadata:
    check_fixed("ernie4_5", config, [("use_bias", False, "there are biases")])
    return {}


def _seed(config: Config) -> Metadata:
    fixed = [(key, False, "there are biases") for key in ("attention_out_bias", "mlp_bias")]
    check_fixed("seed_oss", config, fixed)
    return {}


def _gemma(config: Config) -> Metadata:
    fixed = [("attention_bias", False, "there are biases")]
    fixed.append(("use_bidirectional_attention", False, "tokens attend to later ones"))
    check_fixed("gemma", {k: v for k, v in config.items() if v is not None}, fixed)
    activation = config.get("hidden_activation")
    if activation is None and config.get("hidden_act") != "gelu":
        # Gemma 1's first checkpoints say "gelu" for the form with tanh.
        activation = config.get("hidden_act")
    if activation not in ("gelu_pytorch_tanh", None):
        why = "the MLP does not use GELU's form with tanh"
        raise refuse("gemma", "hidden_activation", activation, why)
    return {}


def _gemma2(config: Config) -> Metadata:
    values = _gemma(config) | window_of_listed_layers(config, period=2)
    values["attention.scale"] = number(config, "query_pre_attn_scalar", 256) ** -0.5
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key) is not None:
            values[key] = number(config, key)
    return values


def _gemma3(config: Config) -> Metadata:
    rope = local_rope(config)
    if rope["rope_type"] != "default":
        raise refuse("gemma3", "rope_type", rope["rope_type"], "windows have scaled positions")
    period = dimension(config, "sliding_window_pattern", 6)
    return (
        _gemma2({**config, "attn_logit_softcapping": None})  # ignored, as in transformers
        | window_of_listed_layers(config, period=6, default_period=period)
        | {"rope.freq_base_swa": number(rope, "rope_theta")}
    )


_LLAMA = _Variant("llama", rotates_pairs=True, qkv_bias=None)
_MISTRAL = _LLAMA._replace(more=window_of_every_layer, absent={"sliding_window": 4096})
_MISTRAL3 = _LLAMA._replace(architecture="mistral3", more=_mistral3, absent={"rms_norm_eps": 1e-5})
_MIXTRAL = _MISTRAL._replace(
    mixture=MIXTRAL_EXPERTS, absent={"rope_theta": 1e6, "rms_norm_eps": 1e-5}
)
_GRANITE = _LLAMA._replace(architecture="granite", more=_granite)
_GRANITE_MOE = _GRANITE._replace(architecture="granitemoe", mixture=GRANITE_EXPERTS)
_SMOLLM3 = _LLAMA._replace(
    architecture="smollm3", more=_smollm3, tied=True, absent={"rope_theta": 2e6}
)

_QWEN2 = _Variant("qwen2", rotates_pairs=False, qkv_bias=True, more=window_of_last_layers)
_QWEN2_VL = _QWEN2._replace(architecture="qwen2vl", more=_qwen_vl)
_QWEN2_MOE = _QWEN2._replace(
    architecture="qwen2moe", mixture=QWEN2_EXPERTS, more=window_of_first_layers
)
_QWEN3 = _QWEN2._replace(architecture="qwen3", qkv_bias=False, qk_norm="heads")
_QWEN3_VL = _QWEN3._replace(architecture="qwen3vl", more=_qwen_vl)
_QWEN3_MOE = _QWEN3._replace(architecture="qwen3moe", mixture=QWEN3_EXPERTS, more=window_if_used)
_OLMOE = _Variant(
    "olmoe",
    rotates_pairs=False,
    qkv_bias=False,
    qk_norm="whole",
    mixture=OLMOE_EXPERTS,
    absent={"rms_norm_eps": 1e-5},
)
_PHI3 = _Variant(
    "phi3",
    rotates_pairs=False,
    qkv_bias=False,
    fused_qkv=True,
    fused_mlp=True,
    partial=1.0,
    more=window_of_every_layer,
    absent={"rms_norm_eps": 1e-5},
)
_GEMMA = _Variant("gemma", rotates_pairs=False, qkv_bias=False, gemma=True, more=_gemma, tied=True)
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
_OLMO2 = _Variant(
    "olmo2",
    rotates_pairs=False,
    qkv_bias=False,
    qk_norm="whole",
    norms=_POST_NORMS,
    absent={"rms_norm_eps": 1e-5},
)
_OLMO3 = _OLMO2._replace(more=_olmo3, absent={"rms_norm_eps": 1e-5, "rope_theta": 500000.0})
_EXAONE4 = _Variant(
    "exaone4",
    rotates_pairs=False,
    qkv_bias=False,
    qk_norm="heads",
    norms=_POST_NORMS,
    more=_exaone4,
    absent={"rms_norm_eps": 1e-5},
)
# Pairs are rotated in its checkpoints, too.
_GLM = _Variant(
    "chatglm",
    rotates_pairs=False,
    qkv_bias=None,
    output_bias=False,
    fused_mlp=True,
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
_ERNIE = _Variant(  # the same
    "ernie4_5",
    rotates_pairs=False,
    qkv_bias=False,
    more=_ernie,
    tied=True,
    absent={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "head_dim": 128},
)
_SEED = _Variant(
    "seed_oss",
    rotates_pairs=False,
    qkv_bias=None,
    output_bias=False,
    norms={"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
    more=_seed,
    absent={"attention_bias": True},
)


def pairs_from_halves(values: Values, head_size: int) -> Values:
    """Permute rows of each head so that dimensions i and i + head_size / 2 become adjacent."""
    halves: Values = values.reshape(-1, 2, head_size // 2, *values.shape[1:])
    return np.reshape(halves.swapaxes(1, 2), values.shape)


def _norm(variant: _Variant, gguf: str, hf: str, size: str = "embd") -> Module:
    return Module(gguf, hf, (size,), add=1.0 if variant.gemma else 0.0)


def _layer(variant: _Variant, config: Config) -> Iterator[Module]:
    biases = variant.qkv_bias is None and flag(config, "attention_bias", False)
    qkv_bias = variant.qkv_bias or biases
    mlp_bias = flag(config, "mlp_bias", False)
    reorder = pairs_from_halves if variant.rotates_pairs else None
    if variant.fused_qkv:
        yield Module("attn_qkv", "self_attn.qkv_proj", ("qkv", "embd"))
    else:
        yield Module("attn_q", "self_attn.q_proj", ("q", "embd"), qkv_bias, reorder)
        yield Module("attn_k", "self_attn.k_proj", ("kv", "embd"), qkv_bias, reorder)
        yield Module("attn_v", "self_attn.v_proj", ("kv", "embd"), qkv_bias)
    if variant.qk_norm:
        whole = variant.qk_norm == "whole"
        yield _norm(variant, "attn_q_norm", "self_attn.q_norm", "q" if whole else "head")
        yield _norm(variant, "attn_k_norm", "self_attn.k_norm", "kv" if whole else "head")
    output_bias = biases and variant.output_bias
    yield Module("attn_output", "self_attn.o_proj", ("embd", "q"), output_bias)
    for gguf, hf in variant.norms.items():
        yield _norm(variant, gguf, hf)
    if variant.mixture is not None:
        yield from variant.mixture.modules()
        return
    if variant.fused_mlp:
        yield Module("ffn_up", "mlp.gate_up_proj", ("gate_and_up", "embd"))
    else:
        yield Module("ffn_gate", "mlp.gate_proj", ("ff", "embd"), mlp_bias)
        yield Module("ffn_up", "mlp.up_proj", ("ff", "embd"), mlp_bias)
    yield Module("ffn_down", "mlp.down_proj", ("embd", "ff"), mlp_bias)


# config.json key, the only value that GGUF can express (HF's default), meaning of others
_FIXED = (("hidden_act", "silu", "the MLP does not use SiLU"),)
_FIXED_QWEN = (
    ("attention_bias", False, "the attention has biases that its official checkpoints lack"),
    ("mlp_bias", False, "the MLP has biases"),
)


def _check_keys(variant: _Variant, config: Config) -> None:
    name = variant.architecture
    if not variant.gemma:
        check_fixed(name, config, _FIXED)
    if variant.qkv_bias is not None:
        check_fixed(name, config, _FIXED_QWEN)


def _rotated(variant: _Variant, config: Config, sizes: Sizes) -> int:
    """The number of rotated dimensions of a head."""
    name, head = variant.architecture, sizes["head"]
    if variant.partial is not None:
        return rotated_share(name, config, head, variant.partial)
    key = "partial_rotary_factor"
    share = rope_parameters(config).get(key, config.get(key, 1.0))
    if share != 1 and name != "gemma3":
        raise refuse(name, key, share, "only a part of a head is rotated")
    return head


def _family(variant: _Variant) -> Family:
    mixture = variant.mixture

    def details(config: Config, sizes: Sizes) -> Metadata:
        _check_keys(variant, config)
        experts = {} if mixture is None else mixture.metadata(config)
        return experts | variant.more(config)

    return Family(
        architecture=variant.architecture,
        layer=lambda config: _layer(variant, config),
        details=details,
        epsilon=("rms_norm_eps", 1e-6),
        rotated=lambda config, sizes: _rotated(variant, config, sizes),
        output_norm=_norm(variant, "output_norm", "norm"),
        tied=variant.tied,
        absent=variant.absent,
        more_sizes=lambda config: {} if mixture is None else mixture.sizes(config),
    )


FAMILIES = {
    "LlamaForCausalLM": _family(_LLAMA),
    "LLaMAForCausalLM": _family(_LLAMA),  # first checkpoints of Llama 1
    "MistralForCausalLM": _family(_MISTRAL),
    "Mistral3ForConditionalGeneration": _family(_MISTRAL3),
    "Ministral3ForCausalLM": _family(_MISTRAL3),
    "MixtralForCausalLM": _family(_MIXTRAL),
    "GraniteForCausalLM": _family(_GRANITE),
    "GraniteMoeForCausalLM": _family(_GRANITE_MOE),
    "SmolLM3ForCausalLM": _family(_SMOLLM3),
    "Qwen2ForCausalLM": _family(_QWEN2),
    "Qwen2VLForConditionalGeneration": _family(_QWEN2_VL),
    "Qwen2_5_VLForConditionalGeneration": _family(_QWEN2_VL),
    "Qwen2MoeForCausalLM": _family(_QWEN2_MOE),
    "Qwen3ForCausalLM": _family(_QWEN3),
    "Qwen3VLForConditionalGeneration": _family(_QWEN3_VL),
    "Qwen3MoeForCausalLM": _family(_QWEN3_MOE),
    "Olmo2ForCausalLM": _family(_OLMO2),
    "Olmo3ForCausalLM": _family(_OLMO3),
    "OlmoeForCausalLM": _family(_OLMOE),
    "Exaone4ForCausalLM": _family(_EXAONE4),
    "GlmForCausalLM": _family(_GLM),
    "Glm4ForCausalLM": _family(_GLM4),
    "Ernie4_5ForCausalLM": _family(_ERNIE),
    "SeedOssForCausalLM": _family(_SEED),
    "Phi3ForCausalLM": _family(_PHI3),
    "GemmaForCausalLM": _family(_GEMMA),
    "Gemma2ForCausalLM": _family(_GEMMA2),
    "Gemma3ForCausalLM": _family(_GEMMA3),
    "Gemma3ForConditionalGeneration": _family(_GEMMA3),
}
