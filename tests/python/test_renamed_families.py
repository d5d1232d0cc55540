"""Families like another one with other names; not all are in transformers.

llama.cpp's converter permutes the rows of InternLM 2 and MiniCPM as those of Llama and Granite.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType

from h2o_cpp import Generator
from h2o_cpp.convert import convert
from support.changed_gguf import changed
from support.needs import packages
from support.opt_checkpoint import (
    Arrays,
    read_metadata,
    read_tensors,
    write_json,
    write_safetensors,
)
from support.random_models import (
    RECIPES,
    Recipe,
    float32_tolerance,
    make_model,
    random_tokens,
    reference_logits,
    save_checkpoint,
)


@packages("torch", "transformers")
@pytest.mark.parametrize(
    ("architecture", "recipe"),
    [
        ("internlm2", "llama_gqa8_biases"),
        ("internlm2", "llama_linear"),
        ("exaone", "qwen2"),
        ("minicpm", "granite"),
    ],
)
def test_renamed_files_have_the_same_logits(tmp_path: Path, architecture: str, recipe: str) -> None:
    save_checkpoint(make_model(RECIPES[recipe], 0), tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    path = changed(tmp_path / "model.gguf", tmp_path / "renamed.gguf", {}, {}, architecture)
    tokens = random_tokens(0)
    with Generator(tmp_path / "model.gguf") as one, Generator(path) as other:
        np.testing.assert_array_equal(one.logits(tokens), other.logits(tokens))


@packages("torch", "transformers")
def test_minicpm_without_its_scales_is_refused(tmp_path: Path) -> None:
    """llama.cpp wrote such files before the keys existed."""
    save_checkpoint(make_model(RECIPES["llama"], 0), tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    path = changed(tmp_path / "model.gguf", tmp_path / "renamed.gguf", {}, {}, "minicpm")
    with pytest.raises(ValueError, match=r"minicpm\.logit_scale"):
        Generator(path)


def _internlm2(config: dict[str, Any], weights: Arrays) -> tuple[dict[str, Any], Arrays]:
    """Q, K and V in one tensor: for each KV head its queries, the key and the value."""
    names = {
        "embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "lm_head": "output",
    }  # fmt: skip
    groups, width = config["num_key_value_heads"], config["hidden_size"]
    head = width // config["num_attention_heads"]
    packed = _renamed({k: v for k, v in weights.items() if not _QKV.search(k)}, names)
    for i in range(config["num_hidden_layers"]):
        q, k, v = _qkv(weights, i)
        parts = [part.reshape(groups, -1, head, width) for part in (q, k, v)]
        packed[f"model.layers.{i}.attention.wqkv.weight"] = np.concatenate(parts, 1).reshape(
            -1, width
        )
    return {"architectures": ["InternLM2ForCausalLM"], "bias": False}, packed


def _internlm3(config: dict[str, Any], weights: Arrays) -> tuple[dict[str, Any], Arrays]:
    return {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": False, "bias": False}, weights


def _exaone(config: dict[str, Any], weights: Arrays) -> tuple[dict[str, Any], Arrays]:
    names = {
        "model.layers": "transformer.h", "model.norm": "transformer.ln_f",
        "model.embed_tokens": "transformer.wte", "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn": "attn.attention", "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1",
        "mlp.down_proj": "mlp.c_proj",
    }  # fmt: skip
    new = {
        "architectures": ["ExaoneForCausalLM"],
        "num_layers": config["num_hidden_layers"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "activation_function": "silu",
        "num_hidden_layers": None,
        "rms_norm_eps": None,
    }
    return new, _renamed(weights, names)


def _minicpm(config: dict[str, Any], weights: Arrays) -> tuple[dict[str, Any], Arrays]:
    new = {
        "architectures": ["MiniCPMForCausalLM"],
        "scale_emb": config["embedding_multiplier"],
        "scale_depth": config["residual_multiplier"] * config["num_hidden_layers"] ** 0.5,
        "dim_model_base": config["hidden_size"] / config["logits_scaling"],
    }
    return new, weights


def _baichuan(config: dict[str, Any], weights: Arrays) -> tuple[dict[str, Any], Arrays]:
    packed = {k: v for k, v in weights.items() if not _QKV.search(k)}
    for i in range(config["num_hidden_layers"]):
        packed[f"model.layers.{i}.self_attn.W_pack.weight"] = np.concatenate(_qkv(weights, i))
    new = {"model_max_length": config["max_position_embeddings"], "max_position_embeddings": None}
    return {"architectures": ["BaichuanForCausalLM"], **new}, packed


_QKV = re.compile(r"[qkv]_proj")


def _qkv(weights: Arrays, layer: int) -> list[Any]:
    return [weights[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]


def _renamed(weights: Arrays, names: dict[str, str]) -> Arrays:
    renamed = {}
    for name, values in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = values
    return renamed


Rewrite = Callable[[dict[str, Any], Arrays], tuple[dict[str, Any], Arrays]]


def _rewrite(path: Path, rewrite: Rewrite) -> None:
    """Rewrite a checkpoint as that of another family."""
    from safetensors.numpy import load_file

    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    new, weights = rewrite(config, load_file(path / "model.safetensors"))
    config = {key: value for key, value in (config | new).items() if value is not None}
    write_json(path / "config.json", config)
    write_safetensors(path / "model.safetensors", weights)


# MiniCPM does not scale attention otherwise.
_UNSCALED = Recipe(
    "Granite", 64, 4, 40, options=RECIPES["granite"].options | {"attention_multiplier": 16**-0.5}
)


@packages("torch", "transformers", "safetensors")
@pytest.mark.parametrize(
    ("architecture", "recipe", "rewrite"),
    [
        ("internlm2", RECIPES["llama_gqa4"], _internlm2),
        ("llama", RECIPES["llama"], _internlm3),
        ("exaone", RECIPES["llama_llama3"], _exaone),
        ("minicpm", _UNSCALED, _minicpm),
        ("baichuan", RECIPES["llama"], _baichuan),
    ],
)
def test_converted_checkpoints_have_the_logits_of_the_other_family(
    tmp_path: Path, architecture: str, recipe: Recipe, rewrite: Rewrite
) -> None:
    model = make_model(recipe, 4)
    save_checkpoint(model, tmp_path)
    _rewrite(tmp_path, rewrite)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    assert read_metadata(tmp_path / "model.gguf")["general.architecture"] == architecture
    tokens = random_tokens(4)
    expected = reference_logits(model, tokens)
    with Generator(tmp_path / "model.gguf", kv_dtype="f32") as generator:
        logits = generator.logits(tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=float32_tolerance(recipe, expected))


@packages("torch", "transformers", "safetensors")
def test_baichuan_13b_has_alibi(tmp_path: Path) -> None:
    """It has 40 layers; the reference is Llama without rotation, and with ALiBi in its mask."""
    import torch

    recipe = replace(RECIPES["llama"], n_layers=40)
    model = make_model(recipe, 5)
    save_checkpoint(model, tmp_path)
    _rewrite(tmp_path, _baichuan)
    convert(tmp_path, tmp_path / "model.gguf", "f32")

    model.model.rotary_emb.inv_freq.zero_()
    tokens = random_tokens(5)
    at = torch.arange(len(tokens))
    distances = (at[:, None] - at).double()
    slopes = torch.tensor([2.0 ** (-2 * (h + 1)) for h in range(4)], dtype=torch.float64)
    mask = torch.where(distances < 0, -torch.inf, -distances * slopes[:, None, None])
    with torch.no_grad():
        ids = torch.as_tensor(tokens)[None]
        expected = model.double()(ids, attention_mask=mask[None]).logits[0].numpy()
    with Generator(tmp_path / "model.gguf", kv_dtype="f32") as generator:
        logits = generator.logits(tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=float32_tolerance(recipe, expected))


def test_baichuan_2_normalizes_its_head() -> None:
    from h2o_cpp.convert.llama_likes import _norm_head

    head = np.random.default_rng(0).normal(size=(125_696, 4)).astype(np.float32)
    np.testing.assert_allclose(np.linalg.norm(_norm_head(head, 0), axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(_norm_head(head[:64_000], 0), head[:64_000])


@packages("torch", "transformers")
def test_qwen_1_has_the_width_of_gate_and_up_together(tmp_path: Path) -> None:
    recipe = Recipe("Qwen2", 32, 4, 56, options={"num_key_value_heads": 4})
    save_checkpoint(make_model(recipe, 6), tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    tensors = {name: values for name, (_, values) in read_tensors(tmp_path / "model.gguf").items()}
    without = [name for name in tensors if re.search(r"attn_[qkv]\.", name)]
    fused = {
        f"blk.{i}.attn_qkv.{kind}": np.concatenate(
            [tensors[f"blk.{i}.attn_{part}.{kind}"] for part in "qkv"]
        )
        for i in range(2)
        for kind in ("weight", "bias")
    }
    path = changed(
        tmp_path / "model.gguf",
        tmp_path / "qwen.gguf",
        {"qwen.feed_forward_length": (112, GGUFValueType.UINT32)},
        fused,
        "qwen",
        without=[*without, "qwen2.feed_forward_length"],
    )
    tokens = random_tokens(0)
    with Generator(tmp_path / "model.gguf") as one, Generator(path) as other:
        np.testing.assert_array_equal(one.logits(tokens), other.logits(tokens))
