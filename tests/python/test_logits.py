"""Logits against Hugging Face transformers: committed ones, and fresh ones where it is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from h2o_cpp import Generator
from h2o_cpp.convert import convert
from random_opt import (
    SHAPES,
    float32_tolerance,
    make_model,
    random_tokens,
    reference_logits,
    save_checkpoint,
)


@pytest.mark.parametrize("name", SHAPES)
def test_golden_logits(data: Path, name: str) -> None:
    golden = np.load(data / "golden" / f"{name}.npz")
    with Generator(data / "golden" / f"{name}.gguf", kv_dtype="f32") as generator:
        logits = generator.logits(golden["tokens"])
    tolerance = float32_tolerance(SHAPES[name], golden["logits"])
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=tolerance)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SHAPES)
def test_random_checkpoints(tmp_path: Path, name: str, seed: int) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    shape = SHAPES[name]
    model = make_model(shape, 100 + seed)
    save_checkpoint(model, tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    tokens = random_tokens(shape, seed)
    expected = reference_logits(model, tokens)
    with Generator(tmp_path / "model.gguf", kv_dtype="f32") as generator:
        logits = generator.logits(tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=float32_tolerance(shape, expected))


@pytest.mark.parametrize(("outtype", "bits"), [("f16", 11), ("bf16", 8), ("q8_0", 7)])
def test_rounded_weights_give_rounded_logits(
    data: Path, tmp_path: Path, outtype: str, bits: int
) -> None:
    """A type that is read wrongly gives logits that have nothing to do with the exact ones."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    shape = SHAPES["plain"]
    model = make_model(shape, 7)
    save_checkpoint(model, tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", outtype)
    tokens = random_tokens(shape, 7)
    expected = reference_logits(model, tokens)
    with Generator(tmp_path / "model.gguf", kv_dtype="f32") as generator:
        error = np.abs(generator.logits(tokens) - expected).max()
    # Each of the 6 matrices of a layer and the 2 outside adds a relative error of about 2^-bits.
    n_matrices = 6 * shape.n_layers + 2
    assert 0 < error < 6 * 2.0**-bits * np.sqrt(n_matrices) * np.abs(expected).max()


def test_trained_model_on_a_held_out_page(shared: Path, tmp_path: Path) -> None:
    """Logits within 1e-3 and the same greedy continuation for 200 tokens."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    checkpoint = shared / "models" / "tiny-opt-hf"
    book = shared / "text" / "robert-louis-stevenson_treasure-island.txt"
    convert(checkpoint, tmp_path / "model.gguf", "f32")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    with Generator(tmp_path / "model.gguf", kv_dtype="f32") as generator:
        page = generator.tokenize(book.read_text(encoding="utf-8")[20_000:24_000])
        with torch.no_grad():
            expected = model(torch.tensor([page])).logits[0].numpy()
        assert np.abs(generator.logits(page) - expected).max() < 1e-3

        prompt = page[:100]
        greedy = model.generate(
            torch.tensor([prompt]), max_new_tokens=200, min_new_tokens=200, do_sample=False
        )
        stream = generator.stream(prompt, max_tokens=200, temperature=0, ignore_eos=True)
        text = "".join(stream)
        assert stream.tokens.tolist() == greedy[0, len(prompt) :].tolist()
        assert text == generator.detokenize(stream.tokens)
