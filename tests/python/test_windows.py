"""Sliding-window attention: exact, and with bounded caches of its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator, Policy
from h2o_cpp.convert import convert
from support.needs import packages
from support.random_models import (
    N_CTX,
    RECIPES,
    float32_tolerance,
    make_model,
    random_tokens,
    reference_logits,
    save_checkpoint,
)

pytestmark = packages("torch", "transformers")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """By recipe: the GGUF file and the transformers model."""
    by_name = {}
    for name in ("mistral_window", "qwen2_windows"):
        path = tmp_path_factory.mktemp(name)
        model = make_model(RECIPES[name], 3)
        save_checkpoint(model, path)
        convert(path, path / "model.gguf", "f32")
        by_name[name] = (path / "model.gguf", model)
    return by_name


@pytest.mark.parametrize("n_batch", [1, 3, 16, N_CTX])
@pytest.mark.parametrize("name", ["mistral_window", "qwen2_windows"])
def test_logits_do_not_depend_on_n_batch(
    models: dict[str, tuple[Path, Any]], name: str, n_batch: int
) -> None:
    file, model = models[name]
    tokens = random_tokens(1)
    expected = reference_logits(model, tokens)
    with Generator(file, kv_dtype="f32", n_batch=n_batch) as generator:
        logits = generator.logits(tokens)
    tolerance = float32_tolerance(RECIPES[name], expected)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [30, 4, 4]),
        ({"hh": 10}, [10, 4, 4]),
        ({"hh": 2}, [2, 2, 2]),
        ({"policy": Policy.window(3)}, [3, 3, 3]),
        ({"policy": [Policy.h2o(4, 4), Policy.full(), Policy.sinks(1, 2)]}, [8, 4, 3]),
    ],
)
def test_tokens_kept_per_layer(
    models: dict[str, tuple[Path, Any]], options: dict[str, Any], kept: list[int]
) -> None:
    """Layers without a window follow their policy; those with one keep its newest tokens."""
    with Generator(models["qwen2_windows"][0], **options) as generator:
        stream = generator.stream(random_tokens(1)[:25].tolist(), max_tokens=6, ignore_eos=True)
        list(stream)
        layers = generator.stats(layers=True).layers
    assert [layer.tokens_kept for layer in layers] == kept
    for layer in layers[1:]:
        assert {head.oldest for head in layer.heads} == {30 - layer.tokens_kept}
        assert {head.heaviest for head in layer.heads} == {-1}


def test_cache_is_as_large_as_the_window(models: dict[str, tuple[Path, Any]]) -> None:
    with Generator(models["mistral_window"][0]) as generator:
        stats = generator.stats()
    assert (
        stats.cache_bytes < stats.full_cache_bytes / 3
    )  # 7 slots of 40, plus padding of each array


def test_windowed_mistral_generates_past_n_ctx(models: dict[str, tuple[Path, Any]]) -> None:
    """Every layer evicts, so positions can roll."""
    with Generator(models["mistral_window"][0]) as generator:
        stream = generator.stream(random_tokens(1).tolist(), max_tokens=2 * N_CTX, ignore_eos=True)
        list(stream)
        assert len(stream.tokens) == 2 * N_CTX
