"""Embeddings (pooled hidden states after the last norm) match transformers and the logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from h2o_cpp import Generator
from h2o_cpp.cli import main
from h2o_cpp.generation.request import Pooling
from support.changed_gguf import changed
from support.converted_files import make_file
from support.needs import packages
from support.random_models import (
    RECIPES,
    float32_tolerance,
    make_model,
    random_tokens,
)

TEXTS = ["The old man went down to the sea.", "A king", "A boy and his dog " * 20]


@pytest.mark.parametrize("name", ["opt_untied", "gptneox"])
def test_last_hidden_state_gives_last_logits(data: Path, name: str) -> None:
    path = data / "golden" / f"{name}.gguf"
    tokens = np.load(data / "golden" / f"{name}.npz")["tokens"].tolist()
    [output] = [t for t in gguf.GGUFReader(path).tensors if t.name == "output.weight"]
    with Generator(path, kv_dtype="f32") as generator:
        hidden = generator.embed(tokens, pooling="last", normalize=False)
        logits = generator.logits(tokens)[-1]
    found = output.data.astype(np.float64) @ hidden
    np.testing.assert_allclose(
        found, logits, rtol=0, atol=float32_tolerance(RECIPES[name], logits.astype(np.float64))
    )


@pytest.mark.parametrize("n_batch", [512, 7])
def test_mean_pooling_averages_hidden_states_of_all_prefixes(tiny_opt: Path, n_batch: int) -> None:
    """Without evictions, for any chunk size."""
    with Generator(tiny_opt, kv_dtype="f32", n_batch=n_batch) as generator:
        tokens = generator.tokenize(TEXTS[0])
        prefixes = [tokens[: i + 1] for i in range(len(tokens))]
        each = generator.embed(prefixes, pooling="last", normalize=False)
        mean = generator.embed(tokens, pooling="mean", normalize=False)
    np.testing.assert_allclose(mean, each.mean(0), rtol=0, atol=1e-3 * np.abs(each).max())
    assert np.abs(each[0] - each[-1]).max() > 0.01 * np.abs(each).max()


def test_batched_embeddings_equal_single_ones(tiny_opt: Path) -> None:
    with Generator(tiny_opt, max_sequences=2) as generator:
        many = generator.embed(TEXTS)
        assert many.shape == (3, 192)
        for text, vector in zip(TEXTS, many, strict=True):
            np.testing.assert_array_equal(generator.embed(text), vector)
            assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
        raw = generator.embed(TEXTS[0], normalize=False)
        np.testing.assert_allclose(raw / np.linalg.norm(raw), many[0], rtol=0, atol=1e-6)


def test_invalid_arguments_are_rejected(tiny_opt: Path) -> None:
    with Generator(tiny_opt, n_ctx=32) as generator:
        pooling: Any = "max"
        with pytest.raises(ValueError, match="pooling='max', expected 'mean' or 'last'"):
            generator.embed("a", pooling=pooling)
        with pytest.raises(ValueError, match="the text is empty"):
            generator.embed("")
        with pytest.raises(ValueError, match=r"text\[1\] is empty"):
            generator.embed(["a", ""])
        with pytest.raises(
            ValueError, match=r"text\[1\] has 33 tokens, .* n_ctx=32; n_ctx can be up to 2048$"
        ):
            generator.embed([[2] * 32, [2] * 33])
    with (
        Generator(tiny_opt) as generator,
        pytest.raises(ValueError, match=r"the text has 2049 .* n_ctx=2048, the trained length$"),
    ):
        generator.embed([2] * 2049)
    with pytest.raises(RuntimeError, match="closed"):
        generator.embed("a")


def test_embed_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_opt: Path) -> None:
    texts = tmp_path / "texts"
    texts.write_text("A king\nA boy\n")
    assert main(["embed", "--file", str(texts), "--lines", "--pooling", "last"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    with Generator(tiny_opt) as generator:
        expected = generator.embed(["A king", "A boy"], pooling="last")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)


@packages("torch", "transformers")
@pytest.mark.parametrize("name", RECIPES)
def test_embeddings_equal_transformers(tmp_path: Path, name: str) -> None:
    import torch

    recipe = RECIPES[name]
    model = make_model(recipe, 3)
    path = make_file(model, tmp_path)
    tokens = random_tokens(3)
    with torch.no_grad():
        answer = model.double()(torch.as_tensor(tokens)[None], output_hidden_states=True)
    expected = answer.hidden_states[-1][0].numpy()
    tolerance = float32_tolerance(recipe, expected)
    with Generator(path, kv_dtype="f32") as generator:
        ids = tokens.tolist()
        last = generator.embed(ids, pooling="last", normalize=False)
        mean = generator.embed(ids, pooling="mean", normalize=False)
    np.testing.assert_allclose(last, expected[-1], rtol=0, atol=tolerance)
    np.testing.assert_allclose(mean, expected.mean(0), rtol=0, atol=tolerance)


def test_command_names_an_empty_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts"
    texts.write_text("a\n\nb\n")
    assert main(["embed", "--file", str(texts), "--lines"]) == 1
    assert "line 2 is empty, expected a text in each line" in capsys.readouterr().err


def test_embedding_is_empty_before_the_end(tiny_opt: Path) -> None:
    with Generator(tiny_opt, threads=1, n_batch=8) as generator:
        tokens = [5 + i % 40 for i in range(300)]
        expected = generator.embed(tokens, pooling="mean", normalize=False)
        with generator.engine() as engine:
            completion = engine.submit(tokens, max_tokens=0, pooling="mean")
            while (found := completion.embedding).size == 0:
                pass
            np.testing.assert_array_equal(found, expected)
            completion.result()


@pytest.mark.parametrize(("number", "pooling"), [(0, "mean"), (1, "mean"), (2, "cls"), (3, "last")])
def test_the_file_says_the_pooling(
    tiny_opt: Path, tmp_path: Path, number: int, pooling: Pooling
) -> None:
    keys = {"opt.pooling_type": (number, gguf.GGUFValueType.UINT32)}
    file = changed(tiny_opt, tmp_path / "model.gguf", keys, {})
    with Generator(file, n_batch=2, threads=1) as generator:
        assert generator.default_pooling == pooling
        found = generator.embed([5, 6, 7])
        np.testing.assert_array_equal(found, generator.embed([5, 6, 7], pooling=pooling))
        first = generator.embed([5, 6, 7], pooling="cls", normalize=False)
        np.testing.assert_array_equal(first, generator.embed([5], pooling="last", normalize=False))


def test_models_that_score_pairs_have_no_embedding(tiny_opt: Path, tmp_path: Path) -> None:
    keys = {"opt.pooling_type": (4, gguf.GGUFValueType.UINT32)}
    with Generator(changed(tiny_opt, tmp_path / "model.gguf", keys, {}), threads=1) as generator:
        with pytest.raises(ValueError, match="pooling_type is rank"):
            generator.embed([5])
        generator.embed([5], pooling="last")
