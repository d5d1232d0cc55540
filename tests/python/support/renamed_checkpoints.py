"""Checkpoints of families that transformers lacks, made of those of others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from support.opt_checkpoint import Arrays
from support.random_models import RECIPES


def read_checkpoint(path: Path) -> tuple[dict[str, Any], Arrays]:
    """config.json and the weights by their names."""
    from safetensors.numpy import load_file

    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config, load_file(path / "model.safetensors")


def renamed(name: str, names: dict[str, str]) -> str:
    """The name with parts replaced by others."""
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def with_joined_projections(weights: Arrays) -> Arrays:
    """The weights with Q, K and V in one tensor, as in Ling's checkpoints."""
    joined = {
        name: values
        for name, values in weights.items()
        if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    for name in weights:
        if name.endswith("self_attn.q_proj.weight"):
            parts = [
                weights[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")
            ]
            joined[name.replace("self_attn.q_proj", "attention.query_key_value")] = np.concatenate(
                parts
            )
    return joined


# Ling's names of parts, by those of Qwen and GLM.
LING = {
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "embed_tokens": "word_embeddings",
    "e_score_correction_bias": "expert_bias",
}

# It becomes Ling 2, whose heads have n_embd / n_heads elements in llama.cpp.
LING_2 = replace(
    RECIPES["glm4_moe_groups"], options=RECIPES["glm4_moe_groups"].options | {"head_dim": 8}
)


def as_ling_2(config: dict[str, Any], weights: Arrays) -> tuple[dict[str, Any], Arrays]:
    """config.json and the weights of LING_2 with the names of Ling 2."""
    config = config | {"architectures": ["BailingMoeV2ForCausalLM"]}
    config["num_experts"] = config.pop("n_routed_experts")
    config["num_shared_experts"] = config.pop("n_shared_experts")
    names = LING | {"shared_head.norm": "final_layernorm"}
    weights = with_joined_projections(weights)
    return config, {renamed(key, names): values for key, values in weights.items()}
