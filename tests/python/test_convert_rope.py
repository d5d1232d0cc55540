"""Conversion of rotary embeddings: metadata keys, and Llama 3's rope_freqs tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from h2o_cpp.convert import convert
from h2o_cpp.convert.rope import rope_metadata
from support.needs import packages
from support.opt_checkpoint import read_tensors
from support.rotary_checkpoint import METADATA, make_checkpoint, model_metadata

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


def convert_metadata(path: Path, architecture: str, **config: object) -> dict[str, Any]:
    make_checkpoint(path, architecture, **config)
    convert(path, path / "out.gguf", "f32")
    return model_metadata(path / "out.gguf")


@pytest.mark.parametrize(
    ("architecture", "rope", "expected"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 3.5}}, {}),
        ("llama", {"rope_theta": 3.5, "rope_scaling": None}, {}),
        (
            "llama",
            {
                "rope_theta": 3.5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 3.5},
                "rope_scaling": {"type": "linear", "factor": 2},  # precedes, as in transformers
            },
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        ),
        (
            "llama",
            {"rope_theta": 3.5, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        ),
        ("llama", {"rope_theta": 3.5, "rope_scaling": {"type": "dynamic", "factor": 2}}, {}),
        (
            "qwen2",
            {"rope_theta": 3.5, "rope_scaling": YARN | {"mscale": 0.5, "mscale_all_dim": 2}},
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 8,
                "rope.scaling.attn_factor": pytest.approx(
                    (1 + 0.05 * np.log(4)) / (1 + 0.2 * np.log(4)) / (1 + 0.1 * np.log(4))
                ),
            },
        ),
        (
            "qwen2",
            {"rope_theta": 3.5, "rope_scaling": YARN | {"mscale": 0.5}},  # as in transformers
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 8,
            },
        ),
        (
            "qwen2",
            {"rope_theta": 3.5, "rope_scaling": YARN},
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 8,
            },
        ),
        (
            "gptneox",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 3.5,
                    "partial_rotary_factor": 0.5,
                    "factor": 4.0,
                    "attention_factor": 1.5,
                    "beta_fast": 16.0,
                    "beta_slow": 2.0,
                }
            },
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.attn_factor": pytest.approx(1.5 / (0.1 * np.log(4) + 1)),
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
            },
        ),
    ],
)
def test_rope_metadata(
    tmp_path: Path, architecture: str, rope: dict[str, Any], expected: dict[str, Any]
) -> None:
    metadata = convert_metadata(tmp_path, architecture, **rope)
    assert metadata == METADATA[architecture] | {"rope.freq_base": 3.5} | expected


def test_attention_factor_precedes_mscale() -> None:
    """transformers does so, also for Ministral."""
    rope = {"rope_type": "yarn", "rope_theta": 3.5, "factor": 4.0, "attention_factor": 1.5}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    config = {"max_position_embeddings": 32, "rope_parameters": rope}
    found = rope_metadata("mistral3", config)
    assert found["rope.scaling.attn_factor"] == pytest.approx(1.5 / (0.1 * np.log(4) + 1))
    assert "rope.scaling.yarn_log_multiplier" not in found


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_llama_3_scaling_becomes_rope_freqs_tensor(tmp_path: Path, key: str) -> None:
    rope: dict[str, object] = (
        LLAMA3_ROPE if key == "rope_scaling" else LLAMA3_ROPE | {"rope_theta": 500000.0}
    )
    metadata = convert_metadata(tmp_path, "llama", head_dim=64, **{key: rope})
    assert metadata["rope.freq_base"] == 500000
    assert not any("scaling" in name for name in metadata)
    dtype, factors = read_tensors(tmp_path / "out.gguf")["rope_freqs.weight"]
    assert dtype is GGMLQuantizationType.F32
    assert factors.shape == (32,)
    for i, divisor in enumerate(factors):
        wavelength = 2 * np.pi * 500000 ** (2 * i / 64)
        if wavelength < 8192 / 4:
            assert divisor == 1
        elif wavelength > 8192 / 1:
            assert divisor == 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            assert divisor == pytest.approx(1 / ((1 - smooth) / 8 + smooth), rel=1e-6)


@packages("torch", "transformers")
def test_llama_3_scaling_equals_transformers(tmp_path: Path) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = LLAMA3_ROPE | {"rope_theta": 500000.0}
    config = transformers.LlamaConfig(head_dim=64, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    convert_metadata(tmp_path, "llama", head_dim=64, rope_parameters=rope)
    _, factors = read_tensors(tmp_path / "out.gguf")["rope_freqs.weight"]
    plain = 500000 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(plain / factors, scaled.numpy(), rtol=1e-6)


def test_llama_3_scaling_of_a_part_of_a_head(tmp_path: Path) -> None:
    rope: dict[str, object] = LLAMA3_ROPE | {"rope_theta": 500000.0}
    half = rope | {"partial_rotary_factor": 0.5}
    convert_metadata(tmp_path, "gptneox", rope_parameters=half)  # of 16 dimensions
    _, factors = read_tensors(tmp_path / "out.gguf")["rope_freqs.weight"]
    convert_metadata(tmp_path, "llama", head_dim=8, rope_parameters=rope)
    _, expected = read_tensors(tmp_path / "out.gguf")["rope_freqs.weight"]
    np.testing.assert_array_equal(factors, expected)


@pytest.mark.parametrize(
    ("original", "factor", "length"), [(32, 4.0, 128), (8, 4.0, 32), (20, 2.5, 50), (8, 2.0, 32)]
)
def test_yarn_extends_the_context(
    tmp_path: Path, original: int, factor: float, length: int
) -> None:
    rope = {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    metadata = convert_metadata(tmp_path, "qwen2", rope_scaling=rope)
    assert metadata["context_length"] == length
