"""exact=True: weights of all types are multiplied in float32, and so is attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from h2o_cpp import BUNDLED_MODEL, Generator
from h2o_cpp.budget.policy import Policy
from h2o_cpp.cli import main
from h2o_cpp.model.session import open_model, open_session
from support.changed_gguf import changed
from support.shapes import config
from support.synthetic import write_model


def small_model(path: Path, dtype: str) -> Path:
    small = config(
        "TinyLlama-1.1B",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=64,
    )
    write_model(path, small, dtype)
    return path


@pytest.fixture(scope="module")
def f16_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "f16.gguf", "F16")


def logits(path: Path, *, exact: bool, kv_dtype: str = "f32") -> NDArray[np.float32]:
    """The logits of some tokens."""
    session = open_session(
        open_model(path, device="cpu", threads=1, exact=exact),
        Policy(),
        n_ctx=64,
        n_batch=64,
        kv_dtype=kv_dtype,
    )
    return np.array(session.step([(0, np.arange(40, dtype=np.int32))]))


def test_exact_logits_equal_float_products(
    f16_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("H2O_ISA", raising=False)
    exact = logits(f16_model, exact=True)
    monkeypatch.setenv("H2O_ISA", "scalar")
    expected = logits(f16_model, exact=False)
    # Sums of up to 512 products in another order, through two layers; bf16 errors are about 1e-3.
    assert np.abs(exact - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "Q4_K_M", "IQ4_XS", "IQ2_XXS", "TQ1_0"])
def test_exact_logits_of_quantized_weights_are_those_of_their_values(
    tmp_path: Path, dtype: str
) -> None:
    path = small_model(tmp_path / "quantized.gguf", dtype)
    values = {
        tensor.name: dequantize(tensor.data, tensor.tensor_type)
        for tensor in GGUFReader(path).tensors
        if tensor.tensor_type != GGMLQuantizationType.F32
    }
    assert values
    expected = logits(changed(path, tmp_path / "f32.gguf", {}, values), exact=False)
    found = logits(path, exact=True)
    # Sums in another order, as above.
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    assert np.abs(logits(path, exact=False) - expected).max() > 1e-3 * np.abs(expected).max()


def test_f32_weights_are_always_exact(tmp_path: Path) -> None:
    """Attention too, although caches in f16 are rounded with other weights."""
    path = small_model(tmp_path / "f32.gguf", "F32")
    found, expected = (logits(path, exact=exact, kv_dtype="f16") for exact in (False, True))
    np.testing.assert_array_equal(found, expected)


def test_backend_name_shows_exact_products() -> None:
    backend = open_model(BUNDLED_MODEL, device="cpu", threads=1, exact=True).backend
    assert "bf16" not in backend
    assert "amx," not in backend
    with Generator(BUNDLED_MODEL, device="cpu", threads=1, exact=True) as generator:
        assert generator.stats().backend == backend


def test_run_with_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "a", "--exact", "--device", "cpu", "-n", "2"]) == 0
    capsys.readouterr()
