"""llama.cpp generates the same tokens and perplexity from the same GGUF file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from h2o_cpp import Generator
from h2o_cpp.convert import convert
from h2o_cpp.quantize import MIXES, quantize
from support.llama_cpp import ONLY_READ, LlamaCpp, perplexities, quantize_with_llama_cpp
from support.needs import packages
from support.random_models import (
    RECIPES,
    Recipe,
    make_model,
    product_bits,
    products_error,
    save_checkpoint,
)

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (extra: engines)")

# llama.cpp does not support `opt`.
FAMILIES = [
    "llama",
    "llama_gqa4",
    "llama_llama3",
    "llama_yarn",
    "llama_linear",
    "gptneox_serial_tanh",
    "qwen2",
    "qwen3",
]


def random_file(recipe: Recipe, directory: Path, outtype: str) -> Path:
    save_checkpoint(make_model(recipe, 11), directory)
    convert(directory, directory / f"{outtype}.gguf", outtype)
    return directory / f"{outtype}.gguf"


@pytest.fixture(scope="session")
def stories(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K in F32: a trained Llama, GQA 8:4, width 64."""
    path = tmp_path_factory.mktemp("stories") / "f32.gguf"
    convert(shared / "models" / "stories260K", path, "f32")
    return path


@pytest.fixture(scope="session")
def story_texts(shared: Path, stories: Path) -> list[list[int]]:
    """Eight texts of 256 tokens."""
    text = (shared / "text" / "tinystories_sample_197k.txt").read_text(encoding="utf-8")
    with Generator(stories) as generator:
        tokens = generator.tokenize(text[:40_000], add_special=False)
        bos = generator.tokenize("")[:1]
    return [bos + tokens[i * 255 : (i + 1) * 255] for i in range(8)]


@pytest.mark.parametrize("outtype", ["f32", "f16"])
@pytest.mark.parametrize("name", FAMILIES)
@packages("torch", "transformers")
def test_random_models_have_same_logits(name: str, outtype: str, tmp_path: Path) -> None:
    """Within the rounding of an f16 cache."""
    path = random_file(RECIPES[name], tmp_path, outtype)
    tokens = np.random.default_rng(3).integers(3, 60, 40).tolist()
    theirs = LlamaCpp(path, 40)
    expected = theirs.logits(tokens)
    theirs.close()
    with Generator(path) as generator:
        logits = generator.logits(tokens)
        bits = product_bits(generator.stats().backend, outtype)
    # Both round keys and values to f16, and llama.cpp activations: 2^-11 each in every layer.
    tolerance = 2.0**-11 * 4 * RECIPES[name].n_layers * np.abs(expected).max()
    if bits < 11:
        tolerance += products_error(RECIPES[name], bits) * np.abs(expected).max()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)


@pytest.fixture
def float_products(tiny_opt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Avoid bf16 products, which may change a greedy token if two are almost equally likely."""
    with Generator(tiny_opt) as generator:
        if product_bits(generator.stats().backend, "f16") < 11:
            monkeypatch.setenv("H2O_ISA", "x86_64_v4_vnni")


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize("outtype", ["f32", "f16"])
@pytest.mark.parametrize("name", ["llama_gqa4", "gptneox_serial_tanh", "qwen2", "qwen3"])
@packages("torch", "transformers")
def test_random_models_generate_same_tokens(name: str, outtype: str, tmp_path: Path) -> None:
    recipe = replace(RECIPES[name], n_ctx=160)
    path = random_file(recipe, tmp_path, outtype)
    theirs = LlamaCpp(path, 160)
    with Generator(path) as generator:
        for seed in range(3):
            prompt = np.random.default_rng(seed).integers(3, 60, 20).tolist()
            stream = generator.stream(prompt, max_tokens=100, temperature=0, ignore_eos=True)
            "".join(stream)
            assert stream.tokens.tolist() == theirs.greedy(prompt, 100)
    theirs.close()


@pytest.mark.usefixtures("float_products")
@pytest.mark.parametrize("outtype", ["f32", "f16"])
def test_trained_model_generates_same_tokens(shared: Path, tmp_path: Path, outtype: str) -> None:
    path = tmp_path / "model.gguf"
    convert(shared / "models" / "stories260K", path, outtype)
    theirs = LlamaCpp(path, 256)
    with Generator(path, kv_dtype="f16") as generator:
        for prompt in ("Once upon a time", "Lily and Ben went to the", "One day, a little dog"):
            tokens = generator.tokenize(prompt)
            stream = generator.stream(tokens, max_tokens=100, temperature=0, ignore_eos=True)
            "".join(stream)
            assert stream.tokens.tolist() == theirs.greedy(tokens, 100)
    theirs.close()


@pytest.mark.parametrize("name", MIXES)
def test_perplexity_of_files_quantized_by_h2o(
    stories: Path, story_texts: list[list[int]], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "model.gguf"
    quantize(stories, path, name)
    ours, theirs = perplexities(path, story_texts)
    assert ours == pytest.approx(theirs, rel=0.005)


@pytest.mark.parametrize("name", ONLY_READ)
def test_perplexity_of_files_quantized_by_llama_cpp(
    stories: Path, story_texts: list[list[int]], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "model.gguf"
    quantize_with_llama_cpp(stories, path, name)
    ours, theirs = perplexities(path, story_texts)
    assert ours == pytest.approx(theirs, rel=0.005)
