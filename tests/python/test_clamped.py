"""Keys and values that the type of the cache cannot store become the largest that it can."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from h2o_cpp import Generator
from h2o_cpp.cli import main
from support.changed_gguf import changed
from support.shapes import config
from support.synthetic import write_model

HEAD_DIM, N_HEADS, N_LAYERS = 32, 2, 2
TOKENS = np.arange(24) + 5
MOST = {"f16": 65504, "q8_0": 127 * 65504, "q5_0": 16 * 65504, "q4_0": 8 * 65504}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen2.gguf"
    shape = config(
        "Qwen2.5-0.5B",
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=N_HEADS,
        vocab_size=512,
        max_position_embeddings=64,
    )
    write_model(path, shape, "F32")
    return path


def with_values(model: Path, name: str, value: float) -> Path:
    """The model whose keys ("k") or values ("v") all are a number, before their rotation."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for layer in range(N_LAYERS):
        part = f"blk.{layer}.attn_{name}"
        tensors[f"{part}.weight"] = np.zeros((N_HEADS * HEAD_DIM, 128), np.float32)
        tensors[f"{part}.bias"] = np.full(N_HEADS * HEAD_DIM, value, np.float32)
    return changed(model, model.with_name(f"{name}{value}.gguf"), {}, tensors)


def logits_of(
    path: Path, kv_dtype: str, hh: float | None = None
) -> tuple[NDArray[np.float32], int]:
    """Logits, and the number of clamped keys and values."""
    with Generator(path, kv_dtype=kv_dtype, hh=hh, n_batch=7, threads=2) as generator:
        return generator.logits(TOKENS), generator.stats().clamped


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kv_dtype", MOST)
@pytest.mark.parametrize("hh", [None, 0.25])
def test_values_are_stored_as_the_largest(
    model: Path, kv_dtype: str, sign: int, hh: float | None
) -> None:
    most = sign * MOST[kv_dtype]
    expected, n_before = logits_of(with_values(model, "v", most), kv_dtype, hh)
    found, n = logits_of(with_values(model, "v", 1.1 * most), kv_dtype, hh)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, expected)
    assert n_before == 0
    assert n == len(TOKENS) * N_HEADS * HEAD_DIM * N_LAYERS


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
def test_types_with_a_range_of_float_clamp_nothing(model: Path, kv_dtype: str) -> None:
    found, n = logits_of(with_values(model, "v", 1e30), kv_dtype)
    assert np.isfinite(found).all()
    assert n == 0


@pytest.mark.parametrize("kv_dtype", MOST)
def test_keys_give_finite_logits(model: Path, kv_dtype: str) -> None:
    """Rotation makes them at most sqrt(2) times as large, and some smaller."""
    found, n = logits_of(with_values(model, "k", MOST[kv_dtype]), kv_dtype)
    assert np.isfinite(found).all()
    assert 0 < n < len(TOKENS) * N_HEADS * HEAD_DIM * N_LAYERS


def test_caches_that_propose_drafts_are_not_counted(model: Path) -> None:
    path = with_values(model, "v", 1e6)
    prompt = np.random.default_rng(1).integers(5, 400, 30).tolist()
    with Generator(path, n_ctx=64, lossless=True, hh=8) as generator:
        result = generator.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True)
        stats = generator.stats()
    n_read = stats.tokens_seen + result.drafted_tokens - result.accepted_tokens
    assert result.drafted_tokens > 0
    assert stats.clamped == n_read * N_HEADS * HEAD_DIM * N_LAYERS


def test_run_tells_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value, told in ((1e6, True), (1.0, False)):
        path = with_values(model, "v", value)
        assert main(["run", str(path), "a", "-n", "2"]) == 0
        assert ("too large for --kv-dtype" in capsys.readouterr().err) == told
