"""F16 and BF16 weights that are multiplied without conversion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from h2o_bench.models import config
from h2o_bench.synthetic import write_model
from h2o_cpp import BUNDLED_MODEL, Generator
from h2o_cpp.cli import main
from h2o_cpp.model.policy import Policy
from h2o_cpp.model.session import open_model, open_session


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in F16."""
    path = tmp_path_factory.mktemp("models") / "f16.gguf"
    small = config(
        "TinyLlama-1.1B",
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=64,
    )
    write_model(path, small, "F16")
    return path


def logits(path: Path, *, exact: bool) -> NDArray[np.float32]:
    """After some tokens, with a cache that rounds nothing."""
    session = open_session(
        open_model(path, device="cpu", threads=1, exact=exact),
        Policy(),
        n_ctx=64,
        n_batch=64,
        kv_dtype="f32",
    )
    return np.array(session.step([(0, np.arange(40, dtype=np.int32))]))


def test_exact_products_are_those_of_floats(floats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("H2O_ISA", raising=False)
    exact = logits(floats, exact=True)
    monkeypatch.setenv("H2O_ISA", "scalar")
    expected = logits(floats, exact=False)
    # Sums of up to 384 products in another order, through two layers; bf16 gives some thousandths.
    assert np.abs(exact - expected).max() <= 1e-4 * np.abs(expected).max()


def test_the_backend_says_so() -> None:
    backend = open_model(BUNDLED_MODEL, device="cpu", threads=1, exact=True).backend
    assert "bf16" not in backend
    assert "amx" not in backend
    with Generator(BUNDLED_MODEL, device="cpu", threads=1, exact=True) as generator:
        assert generator.stats().backend == backend


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "a", "--exact", "--device", "cpu", "-n", "2"]) == 0
    capsys.readouterr()
