"""Rotary position embedding: from config.json to GGUF metadata and tensors.

transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling.
"""

from collections.abc import Mapping
from math import log, pi, sqrt
from typing import Any

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, Metadata, dimension, number, refuse

_DEFAULT_BASE = 10000.0
_KINDS = {"full_attention", "sliding_attention"}  # if layers differ

# The divisor of frequencies of dimensions that are not rotated, as in llama.cpp's files.
_UNROTATED = 1e30

_WITH_LONGROPE = ("phi3", "phimoe", "minicpm", "minicpm3")

# Architectures whose files cannot have Llama 3's factors of frequencies.
_WITHOUT_FACTORS = ("lfm2", "lfm2moe", "qwen35", "qwen35moe", "qwen3next")


def rope_metadata(architecture: str, config: Config) -> Metadata:
    """The keys rope.freq_base and rope.scaling.*; raises ValueError for an unknown scaling."""
    rope = rope_parameters(config)
    metadata: Metadata = {"rope.freq_base": number(rope, "rope_theta", _DEFAULT_BASE)}
    factors = architecture not in _WITHOUT_FACTORS
    match rope["rope_type"]:
        case "default":
            return metadata
        case "llama3" if factors:  # see rope_tensors
            return metadata
        case "proportional" if architecture == "gemma4":  # see rope_tensors
            return metadata
        case "mrope" if architecture == "qwen2vl":
            return metadata
        case "dynamic" if rope.get("alpha") is not None:  # Hunyuan's, for all lengths
            head = dimension(config, "head_dim", _head_size(config))
            alpha = number(rope, "alpha") ** (head / (head - 2))
            return {"rope.freq_base": number(rope, "rope_theta", _DEFAULT_BASE) * alpha}
        case "dynamic":  # differs from default only beyond the context length
            return metadata
        case "linear":
            return metadata | {
                "rope.scaling.type": "linear",
                "rope.scaling.factor": number(rope, "factor"),
            }
        case "longrope" | "su" if architecture in _WITH_LONGROPE:  # factors: see rope_tensors
            return metadata | _longrope(architecture, config, rope)
        case "yarn":
            return metadata | _yarn(architecture, config, rope)
        case other:
            known = "linear, dynamic, yarn and llama3" if factors else "linear, dynamic and yarn"
            raise refuse(architecture, "rope_type", other, f"only {known} are known")


def _head_size(config: Config) -> int:
    return dimension(config, "hidden_size") // dimension(config, "num_attention_heads")


def rope_tensors(config: Config, rotated: int) -> dict[str, Values]:
    """Divisors of the frequencies of each pair of `rotated` dimensions: Llama 3's, or LongRoPE's.

    LongRoPE has two lists, for contexts up to the original length and for longer ones. Llama 3
    divides low frequencies by `factor`, keeps high ones and interpolates in between. Gemma 4
    rotates a share of the pairs: the others are divided by a number that leaves no angle.
    """
    rope = rope_parameters(config)
    if rope["rope_type"] in ("longrope", "su"):
        return {f"rope_factors_{kind}.weight": _factors(rope, kind) for kind in ("long", "short")}
    if rope["rope_type"] == "proportional":
        divisors = np.full(rotated // 2, _UNROTATED, np.float32)
        n = int(number(rope, "partial_rotary_factor", 1.0) * rotated / 2)
        divisors[:n] = number(rope, "factor", 1.0)
        return {"rope_freqs.weight": divisors}
    if rope["rope_type"] != "llama3":
        return {}
    base = number(rope, "rope_theta", _DEFAULT_BASE)
    factor = number(rope, "factor")
    low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
    context = dimension(rope, "original_max_position_embeddings")
    if low > high:
        raise ValueError(f"config.json: high_freq_factor {high} must be at least {low}")

    wavelengths = 2 * pi * base ** (np.arange(0, rotated, 2) / rotated)
    share = np.clip((context / wavelengths - low) / max(high - low, 1e-9), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - share) / factor + share)).astype(np.float32)}


def rope_parameters(config: Config) -> Mapping[str, Any]:
    """The parameters in transformers 5's form: rope_theta, rope_type and those of the type."""
    for key in ("rope_scaling", "rope_parameters"):  # as in transformers, the older one first
        found = config.get(key)
        if not found:
            continue
        if isinstance(found, dict) and found.keys() == _KINDS:
            found = found["full_attention"]
        if not isinstance(found, dict) or any(isinstance(v, dict) for v in found.values()):
            raise ValueError(
                f"config.json: {key} differs between layers, expected one set of parameters"
            )
        break
    else:
        found = {}
    theta = config.get("rope_theta", config.get("rotary_emb_base"))  # GPT-NeoX
    return {"rope_theta": theta, "rope_type": found.get("type", "default")} | found


def rope_sections(config: Config, default: list[int] | None = None) -> Metadata:
    """M-RoPE's numbers of pairs for each axis of a position: time, height, width, and none."""
    sections = rope_parameters(config).get("mrope_section", default)
    if not isinstance(sections, list) or not all(type(n) is int for n in sections):
        raise ValueError(
            f"config.json: mrope_section must be a list of integers, found {sections!r}"
        )
    return {"rope.dimension_sections": [*sections, 0]}


def rope_of_windows(architecture: str, config: Config, default: float = _DEFAULT_BASE) -> Metadata:
    """The base of layers with a window, if layers differ, as in Gemma 3 and OLMo 3."""
    found = config.get("rope_parameters")
    if not isinstance(found, dict) or found.keys() != _KINDS:
        return {"rope.freq_base_swa": number(config, "rope_local_base_freq", default)}
    rope = rope_parameters({"rope_parameters": found["sliding_attention"]})
    if rope["rope_type"] != "default":
        raise refuse(architecture, "rope_type", rope["rope_type"], "windows have scaled positions")
    return {"rope.freq_base_swa": number(rope, "rope_theta")}


def rotated_share(
    architecture: str, config: Config, head: int, default: float, old_key: str | None = None
) -> int:
    """The number of rotated dimensions, given as a fraction of the head.

    old_key: the key in config.json, if not partial_rotary_factor.
    """
    key = "partial_rotary_factor"
    share = rope_parameters(config).get(key, config.get(old_key or key, default))
    rotated = int(number({key: share}, key) * head)
    if rotated % 2 or not 0 < rotated <= head:
        why = f"{rotated} of {head} dimensions of a head would be rotated"
        raise refuse(architecture, key, share, why)
    return rotated


def _longrope(architecture: str, config: Config, rope: Mapping[str, Any]) -> Metadata:
    key = "original_max_position_embeddings"
    original = dimension(rope if rope.get(key) is not None else config, key)
    factor = number(rope, "factor", dimension(config, "max_position_embeddings") / original)
    own = sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0
    if rope.get("short_mscale") is not None:  # Phi-3.5-MoE
        own = number(rope, "short_mscale")
        if rope.get("long_mscale") != own:
            raise refuse(architecture, "long_mscale", rope.get("long_mscale"), "it has two factors")
    return {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": number(rope, "attention_factor", own),
    }


def _factors(rope: Mapping[str, Any], kind: str) -> Values:
    key = f"{kind}_factor"
    values = rope.get(key)
    if not isinstance(values, list) or not values:
        raise ValueError(f"config.json: {key} must be a list of numbers, found {values!r}")
    return np.array([number({key: value}, key) for value in values], np.float32)


def _yarn(architecture: str, config: Config, rope: Mapping[str, Any]) -> Metadata:
    if rope.get("truncate", True) == (architecture == "gpt-oss"):  # gpt-oss does not round
        raise refuse(architecture, "truncate", rope.get("truncate", True), "a variant of yarn")
    factor, context = number(rope, "factor"), dimension(config, "max_position_embeddings")
    original = dimension(rope, "original_max_position_embeddings", context)
    metadata: Metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
    }
    if rope.get("original_max_position_embeddings") is not None:
        # Qwen's instructions add YaRN to config.json without changing max_position_embeddings.
        metadata["context_length"] = max(context, int(original * factor))

    def own(mscale: float) -> float:
        return 1 + 0.1 * mscale * log(factor) if factor > 1 else 1.0

    if architecture in ("deepseek2", "mistral4"):  # scales logits, and not cosines and sines
        mscale = rope.get("mscale")
        if not mscale or mscale != rope.get("mscale_all_dim") or "attention_factor" in rope:
            raise refuse(architecture, "mscale", mscale, "a variant of yarn")
        metadata["rope.scaling.yarn_log_multiplier"] = 0.1 * number(rope, "mscale_all_dim")
    # HF's value replaces YaRN's own factor, ggml's multiplies it.
    elif rope.get("attention_factor") is not None:
        metadata["rope.scaling.attn_factor"] = number(rope, "attention_factor") / own(1)
    elif architecture == "mistral3":
        if rope.get("mscale", 1) != 1:
            raise refuse(architecture, "mscale", rope["mscale"], "a variant of yarn")
        if rope.get("mscale_all_dim"):
            metadata["rope.scaling.yarn_log_multiplier"] = number(rope, "mscale_all_dim")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        scales = own(number(rope, "mscale")), own(number(rope, "mscale_all_dim"))
        metadata["rope.scaling.attn_factor"] = scales[0] / scales[1] / own(1)
    for key in ("beta_fast", "beta_slow"):  # llama.cpp reads these only for a few architectures
        if rope.get(key) is not None:
            metadata[f"rope.scaling.yarn_{key}"] = number(rope, key)
    return metadata
