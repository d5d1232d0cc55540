"""Mixtures of experts with sigmoids, selection biases, shared experts and first layers without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType

from h2o_cpp import Generator, _core
from h2o_cpp.budget.cache_memory import ModelShape
from h2o_cpp.convert import convert
from h2o_cpp.measure.traffic import weights as weights_of
from h2o_cpp.model.session import open_model
from support.changed_gguf import changed
from support.converted_files import make_file
from support.needs import packages
from support.opt_checkpoint import (
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
from support.renamed_checkpoints import (
    LING,
    LING_2,
    as_ling_2,
    read_checkpoint,
    renamed,
    with_joined_projections,
)

pytestmark = packages("torch", "transformers", "safetensors")
U32 = GGUFValueType.UINT32

# Its shared expert has a gate.
QWEN = Recipe(
    "Qwen2Moe",
    32,
    4,
    40,
    n_layers=3,
    options={
        "num_key_value_heads": 2,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 48,
        "qkv_bias": False,
    },
)


def assert_same_logits(path: Path, model: Any, recipe: Recipe) -> None:
    tokens = random_tokens(5)
    expected = reference_logits(model, tokens)
    with Generator(path, kv_dtype="f32") as generator:
        logits = generator.logits(tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=float32_tolerance(recipe, expected))


@pytest.mark.parametrize(
    ("name", "normalized"), [("deepseek", False), ("bailingmoe", False), ("bailingmoe", True)]
)
def test_shared_experts_without_a_gate(tmp_path: Path, name: str, normalized: bool) -> None:
    """transformers has no class for the first DeepSeek-MoE and Ling; they are Qwen's mixture with
    a gate of sigmoid(0) = 0.5, which their shared experts do not have.
    """
    import torch

    first = [0] if name == "deepseek" else []
    options = QWEN.options | {"norm_topk_prob": normalized, "mlp_only_layers": first}
    recipe = replace(QWEN, options=options)
    model = make_model(recipe, 21)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "shared_expert_gate" in parameter_name:
                parameter.zero_()
    save_checkpoint(model, tmp_path)
    config, weights = read_checkpoint(tmp_path)
    weights = {
        renamed(key, {"shared_expert.": "shared_experts."}): (
            values / 2 if "shared_expert.down_proj" in key else values
        )
        for key, values in weights.items()
        if "shared_expert_gate" not in key
    }
    config |= {"n_routed_experts": 6, "n_shared_experts": 2, "num_shared_experts": 2}
    config |= {"first_k_dense_replace": len(first), "architectures": ["DeepseekForCausalLM"]}
    if name == "bailingmoe":
        config["architectures"] = ["BailingMoeForCausalLM"]
        weights = with_joined_projections(weights)
        weights = {renamed(key, LING): values for key, values in weights.items()}
    write_json(tmp_path / "config.json", config)
    write_safetensors(tmp_path / "model.safetensors", weights)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    metadata = read_metadata(tmp_path / "model.gguf")
    assert metadata["general.architecture"] == name
    assert metadata[f"{name}.leading_dense_block_count"] == len(first)
    assert metadata[f"{name}.expert_shared_count"] == 2
    assert_same_logits(tmp_path / "model.gguf", model, recipe)


def test_ling_2_is_glm_4_5_with_other_names(tmp_path: Path) -> None:
    model = make_model(LING_2, 22)
    save_checkpoint(model, tmp_path)
    config, weights = as_ling_2(*read_checkpoint(tmp_path))
    write_json(tmp_path / "config.json", config)
    write_safetensors(tmp_path / "model.safetensors", weights)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    metadata = read_metadata(tmp_path / "model.gguf")
    assert metadata["general.architecture"] == "bailingmoe2"
    assert metadata["bailingmoe2.expert_group_count"] == 4
    assert metadata["bailingmoe2.expert_group_used_count"] == 2
    assert "blk.0.attn_qkv.weight" in read_tensors(tmp_path / "model.gguf")
    assert_same_logits(tmp_path / "model.gguf", model, LING_2)


def test_layers_that_predict_further_tokens_change_no_logits(tmp_path: Path) -> None:
    """Checkpoints have them after the others; files have some."""
    recipe = RECIPES["glm4_moe"]
    model = make_model(recipe, 23)
    save_checkpoint(model, tmp_path)
    config, weights = read_checkpoint(tmp_path)
    last = {
        key.replace("layers.2.", "layers.3."): values
        for key, values in weights.items()
        if ".layers.2." in key
    }
    norms = ("enorm", "hnorm", "shared_head.norm")
    last |= {f"model.layers.3.{norm}.weight": np.ones(32, np.float32) for norm in norms}
    weights |= last | {"model.layers.3.eh_proj.weight": np.zeros((32, 64), np.float32)}
    write_json(tmp_path / "config.json", config | {"num_nextn_predict_layers": 1})
    write_safetensors(tmp_path / "model.safetensors", weights)
    file = tmp_path / "model.gguf"
    convert(tmp_path, file, "f32")
    metadata = read_metadata(file)
    assert metadata["glm4moe.block_count"] == 4
    assert metadata["glm4moe.nextn_predict_layers"] == 1
    assert_same_logits(file, model, recipe)
    assert ModelShape.of_file(file).n_layers == 3
    assert {w.name for w in weights_of([_core.GgufFile(file)])} == {
        name for name in read_tensors(file) if not name.startswith("blk.3.")
    }

    without = {"glm4moe.nextn_predict_layers": (0, U32)}
    file = changed(file, tmp_path / "all.gguf", without, {})
    with pytest.raises(ValueError, match=r"nextn\.\w+\.weight' is not part of"):
        Generator(file)


@pytest.mark.parametrize("name", ["glm4_moe", "ernie4_5_moe"])
def test_max_resident_does_not_change_logits(tmp_path: Path, name: str) -> None:
    """Neither if experts are read as they are needed, nor if layers are streamed."""
    path = make_file(make_model(RECIPES[name], 24), tmp_path)
    tokens = random_tokens(6)
    with Generator(path, device="cpu", threads=1) as generator:
        expected = generator.logits(tokens)
    with pytest.raises(ValueError, match=r"max_resident is 1 bytes; .* take \d+") as error:
        open_model(path, device="cpu", threads=1, max_resident=1)
    least = int(str(error.value).split()[-1])
    for size in (least, least + 20_000):
        with Generator(path, device="cpu", threads=1, max_resident=size) as generator:
            np.testing.assert_array_equal(generator.logits(tokens), expected)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("ernie4_5_moe", {"moe_layer_interval": 2}, "moe_layer_interval is 2: some layers have no"),
        ("ernie4_5_moe", {"moe_layer_end_index": 1}, "moe_layer_end_index is 1: the last layers"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True: there are biases"),
        (
            "dots1",
            {"sliding_window": 5, "layer_types": None, "max_window_layers": 1},
            "some layers",
        ),
        ("exaone_moe", {"mlp_layer_types": ["dense", "sparse"] * 2 + ["dense"]}, "mlp_layer_types"),
        ("glm4_moe", {"n_routed_experts": 2}, "num_experts_per_tok is 3, but there are 2 experts"),
    ],
)
def test_what_files_cannot_express_is_refused(
    tmp_path: Path, name: str, config: dict[str, Any], message: str
) -> None:
    save_checkpoint(make_model(RECIPES[name], 0), tmp_path)
    settings, _ = read_checkpoint(tmp_path)
    write_json(tmp_path / "config.json", settings | config)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("Deepseek", {"norm_topk_prob": True}, "norm_topk_prob is True: the weights"),
        ("Deepseek", {"moe_layer_freq": 2}, "moe_layer_freq is 2: some layers have no experts"),
        ("BailingMoe", {"norm_head": True}, "norm_head is True: the output layer is normalized"),
        ("BailingMoeV2", {"use_qkv_bias": True}, "use_qkv_bias is True: there are biases"),
    ],
)
def test_checkpoints_without_a_class_are_refused_plainly(
    tmp_path: Path, architecture: str, config: dict[str, Any], message: str
) -> None:
    save_checkpoint(make_model(QWEN, 0), tmp_path)
    settings, _ = read_checkpoint(tmp_path)
    settings |= {"architectures": [f"{architecture}ForCausalLM"], "norm_topk_prob": False}
    write_json(tmp_path / "config.json", settings | config)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path, tmp_path / "model.gguf")


def test_old_checkpoints_of_minimax_have_rotary_dim(tmp_path: Path) -> None:
    recipe = RECIPES["minimax_m2"]
    model = make_model(recipe, 25)
    save_checkpoint(model, tmp_path)
    config, _ = read_checkpoint(tmp_path)
    del config["rope_parameters"]
    write_json(tmp_path / "config.json", config | {"rotary_dim": 6, "rope_theta": 5e6})
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    assert read_metadata(tmp_path / "model.gguf")["minimax-m2.rope.dimension_count"] == 6
    assert_same_logits(tmp_path / "model.gguf", model, recipe)
