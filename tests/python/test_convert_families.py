"""Conversion of families with rotary embeddings: metadata, tensors and errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize, quantize

from h2o_cpp import Generator
from h2o_cpp.convert import convert
from h2o_cpp.convert.checkpoint import read_json
from h2o_cpp.convert.gpt import grouped_by_projection
from h2o_cpp.convert.llama_layout import pairs_from_halves
from support.changed_gguf import changed
from support.needs import packages
from support.opt_checkpoint import (
    TOKENS,
    Array,
    read_metadata,
    read_tensors,
    write_json,
    write_safetensors,
    write_tokenizer_json,
)
from support.random_models import RECIPES, make_model, save_checkpoint
from support.rotary_checkpoint import (
    CONFIGS,
    METADATA,
    expected_tensors,
    make_checkpoint,
    model_metadata,
)

ARCHITECTURES = list(CONFIGS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_metadata(tmp_path: Path, architecture: str) -> None:
    make_checkpoint(tmp_path, architecture)
    convert(tmp_path, tmp_path / "out.gguf", "f32")
    assert model_metadata(tmp_path / "out.gguf") == METADATA[architecture]
    metadata = read_metadata(tmp_path / "out.gguf")
    assert metadata["general.architecture"] == architecture
    assert metadata["general.file_type"] == 0
    assert metadata["tokenizer.ggml.tokens"] == [*TOKENS, "[PAD9]", "[PAD10]", "[PAD11]"]


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensor_names_types_and_values(tmp_path: Path, architecture: str, outtype: str) -> None:
    weights = make_checkpoint(tmp_path, architecture)
    convert(tmp_path, tmp_path / "out.gguf", outtype)
    tensors = read_tensors(tmp_path / "out.gguf")
    expected = expected_tensors(architecture, CONFIGS[architecture], weights)
    assert tensors.keys() == expected.keys()
    for name, (dtype, values) in tensors.items():
        small = expected[name].ndim == 1
        assert dtype is (
            GGMLQuantizationType.F32 if small else GGMLQuantizationType[outtype.upper()]
        )
        np.testing.assert_array_equal(values, dequantize(quantize(expected[name], dtype), dtype))


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 4, "head_dim": None}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 20}),
        ("llama", {"architectures": ["MistralForCausalLM"], "sliding_window": None}),
        ("llama", {"architectures": ["MistralForCausalLM"], "sliding_window": 32}),
        ("llama", {"architectures": ["LlamaForCausalLM"], "sliding_window": 8}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}),
        ("llama", {"architectures": ["LLaMAForCausalLM"]}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_config_variants(tmp_path: Path, architecture: str, config: dict[str, Any]) -> None:
    weights = make_checkpoint(tmp_path, architecture, **config)
    convert(tmp_path, tmp_path / "out.gguf", "f32")
    settings = CONFIGS[architecture] | config
    expected = expected_tensors(architecture, settings, weights)
    tensors = read_tensors(tmp_path / "out.gguf")
    assert tensors.keys() == expected.keys()
    for name, (_, values) in tensors.items():
        np.testing.assert_array_equal(values, expected[name])
    metadata = read_metadata(tmp_path / "out.gguf")
    for key in ("key_length", "value_length"):
        assert metadata.get(f"{architecture}.attention.{key}") == settings.get("head_dim")
    assert not any("sliding_window" in key for key in metadata)


@pytest.mark.parametrize(
    ("architecture", "config", "pattern"),
    [
        ("llama", {"architectures": ["MistralForCausalLM"]}, None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, [False, True]),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [True, False],
        ),
    ],
)
def test_sliding_window_metadata(
    tmp_path: Path, architecture: str, config: dict[str, Any], pattern: list[bool] | None
) -> None:
    make_checkpoint(tmp_path, architecture, sliding_window=8, **config)
    convert(tmp_path, tmp_path / "out.gguf")
    expected = METADATA[architecture] | {"attention.sliding_window": 8}
    if pattern is not None:
        expected["attention.sliding_window_pattern"] = pattern
    assert model_metadata(tmp_path / "out.gguf") == expected


def test_missing_num_key_value_heads_means_multi_head_attention(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_key_value_heads=4)
    config = CONFIGS["llama"] | {"num_key_value_heads": None}
    write_json(tmp_path / "config.json", config)
    convert(tmp_path, tmp_path / "out.gguf")
    assert read_metadata(tmp_path / "out.gguf")["llama.attention.head_count_kv"] == 4


def rotate(values: Array, pairs: list[tuple[int, int]], angles: Array) -> Array:
    rotated: Array = values.copy()
    for (a, b), angle in zip(pairs, angles, strict=True):
        rotated[a] = values[a] * np.cos(angle) - values[b] * np.sin(angle)
        rotated[b] = values[b] * np.cos(angle) + values[a] * np.sin(angle)
    return rotated


@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_rotating_permuted_pairs_equals_rotating_halves(
    shape: tuple[int, ...],
) -> None:
    rng = np.random.default_rng(1)
    values: Array = rng.normal(size=shape).astype(np.float32)
    angles: Array = rng.normal(size=4)
    halves = [(i, i + 4) for i in range(4)]
    adjacent = [(2 * i, 2 * i + 1) for i in range(4)]
    for head in range(3):
        rows = slice(8 * head, 8 * head + 8)
        np.testing.assert_allclose(
            rotate(pairs_from_halves(values, 8)[rows], adjacent, angles),
            pairs_from_halves(rotate(values[rows], halves, angles), 8),
            rtol=1e-5,
        )


@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_fused_qkv_is_grouped_by_projection(shape: tuple[int, ...]) -> None:
    values: Array = np.arange(np.prod(shape)).reshape(shape)
    grouped = grouped_by_projection(values, 4)  # 2 heads
    for projection in range(3):
        for head in range(2):
            start = 8 * projection + 4 * head
            source = 12 * head + 4 * projection
            np.testing.assert_array_equal(grouped[start : start + 4], values[source : source + 4])


@pytest.mark.parametrize(
    ("activation", "written"),
    [
        ("gelu", "gelu_erf"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
    ],
)
def test_gelu_variant(tmp_path: Path, activation: str, written: str) -> None:
    make_checkpoint(tmp_path, "gptneox", hidden_act=activation, use_parallel_residual=False)
    convert(tmp_path, tmp_path / "out.gguf")
    assert model_metadata(tmp_path / "out.gguf") == METADATA["gptneox"] | {
        "h2o.activation": written,
        "use_parallel_residual": False,
    }


@pytest.mark.parametrize(
    ("architecture", "buffers"),
    [
        ("llama", {"model.layers.1.self_attn.rotary_emb.inv_freq": "F32"}),
        (
            "gptneox",
            {
                "gpt_neox.layers.0.attention.bias": "BOOL",
                "gpt_neox.layers.0.attention.masked_bias": "F32",
                "gpt_neox.layers.0.attention.rotary_emb.inv_freq": "F32",
            },
        ),
    ],
)
def test_buffers_of_old_checkpoints_are_ignored(
    tmp_path: Path, architecture: str, buffers: dict[str, str]
) -> None:
    weights = make_checkpoint(tmp_path, architecture)
    convert(tmp_path, tmp_path / "new.gguf")
    extra = {name: np.ones((1, 4)) for name in buffers}
    write_safetensors(tmp_path / "model.safetensors", weights | extra, dtypes=buffers)
    convert(tmp_path, tmp_path / "old.gguf")
    assert (tmp_path / "old.gguf").read_bytes() == (tmp_path / "new.gguf").read_bytes()


@packages("torch")
def test_buffers_of_old_pytorch_files_are_ignored(tmp_path: Path) -> None:
    import torch

    weights = make_checkpoint(tmp_path, "gptneox")
    convert(tmp_path, tmp_path / "new.gguf")
    state = {name: torch.tensor(values) for name, values in weights.items()}
    state["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    convert(tmp_path, tmp_path / "old.gguf")
    assert (tmp_path / "old.gguf").read_bytes() == (tmp_path / "new.gguf").read_bytes()


@pytest.mark.parametrize(
    ("architecture", "removed", "message"),
    [
        ("llama", "lm_head.weight", "lm_head.weight is missing"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias", "k_proj.bias is missing"),
        ("qwen3", "model.layers.1.self_attn.q_norm.weight", "q_norm.weight is missing"),
        ("gptneox", "embed_out.weight", "embed_out.weight is missing"),
    ],
)
def test_missing_tensors(tmp_path: Path, architecture: str, removed: str, message: str) -> None:
    weights = make_checkpoint(tmp_path, architecture)
    del weights[removed]
    write_safetensors(tmp_path / "model.safetensors", weights)
    with pytest.raises(ValueError, match=re.escape(message)):
        convert(tmp_path, tmp_path / "out.gguf")


def test_unexpected_tensors_are_rejected(tmp_path: Path) -> None:
    weights = make_checkpoint(tmp_path, "llama", attention_bias=True)
    write_json(tmp_path / "config.json", CONFIGS["llama"])
    with pytest.raises(ValueError, match=r"q_proj\.bias is unknown in architecture"):
        convert(tmp_path, tmp_path / "out.gguf")
    weights = make_checkpoint(tmp_path, "llama")
    name = "model.layers.0.self_attn.q_proj.weight"
    write_safetensors(tmp_path / "model.safetensors", weights, dtypes={name: "I8"})
    with pytest.raises(
        ValueError, match=rf"{name} has an unsupported type, expected f64, f32, f16 or bf16"
    ):
        convert(tmp_path, tmp_path / "out.gguf")


def test_trained_checkpoint(shared: Path, tmp_path: Path) -> None:
    convert(shared / "models" / "stories260K", tmp_path / "out.gguf", "f32")
    metadata = read_metadata(tmp_path / "out.gguf")
    assert metadata["llama.attention.head_count"] == 8
    assert metadata["llama.attention.head_count_kv"] == 4
    assert metadata["llama.rope.dimension_count"] == 8
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.tokens"][259:262] == ["▁t", "he", "▁a"]
    assert metadata["tokenizer.ggml.scores"][259:262] == [0, -1, -2]
    assert metadata["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    tensors = read_tensors(tmp_path / "out.gguf")
    assert len(tensors) == 2 + 9 * 5
    assert "output.weight" not in tensors


def test_tokenizer_is_independent_of_family(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gptneox")
    write_tokenizer_json(tmp_path, {"normalizer": {"type": "NFC"}})
    convert(tmp_path, tmp_path / "out.gguf")
    metadata = read_metadata(tmp_path / "out.gguf")
    assert metadata["tokenizer.ggml.pre"] == "olmo"
    assert metadata["tokenizer.ggml.add_bos_token"] is False


@packages("torch", "transformers")
def test_granite_4(tmp_path: Path) -> None:
    """llama.cpp's files of Granite 4 have keys of state-space layers; it may have no positions."""
    save_checkpoint(make_model(RECIPES["granite4"], 0), tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    keys: dict[str, tuple[Any, GGUFValueType]] = {
        "granite.ssm.conv_kernel": (4, GGUFValueType.UINT32),
        "granite.ssm.time_step_rank": (4, GGUFValueType.UINT32),
        "granite.attention.head_count_kv": ([2, 2], GGUFValueType.ARRAY),
        "granite.rope.scaling.finetuned": (True, GGUFValueType.BOOL),
    }
    path = changed(tmp_path / "model.gguf", tmp_path / "keys.gguf", keys, {})
    with Generator(tmp_path / "model.gguf") as one, Generator(path) as other:
        np.testing.assert_array_equal(one.logits([5, 6, 7]), other.logits([5, 6, 7]))
    keys = {"granite.rope.scaling.finetuned": (False, GGUFValueType.BOOL)}
    path = changed(path, tmp_path / "none.gguf", keys, {})
    config = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", config | {"position_embedding_type": "nope"})
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    with Generator(tmp_path / "model.gguf") as one, Generator(path) as other:
        np.testing.assert_array_equal(one.logits([5, 6, 7]), other.logits([5, 6, 7]))
