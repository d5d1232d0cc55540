"""Drafts of models with recurrent states: what was read and retracted leaves no trace."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator, Policy
from support.converted_files import make_file
from support.needs import packages
from support.outputs import left, only_some
from support.random_models import (
    CONVOLUTIONS,
    HYBRIDS,
    STATE_SPACES,
    make_model,
)

pytestmark = packages("torch", "transformers", "safetensors")

_NAMES = ("qwen35", "qwen3next", "lfm2", "falcon_h1", "nemotron_h")
MODELS = {name: (HYBRIDS | CONVOLUTIONS | STATE_SPACES)[name] for name in _NAMES}


@pytest.fixture(scope="module", params=MODELS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    recipe = dataclasses.replace(MODELS[request.param], n_ctx=128)
    return make_file(make_model(recipe, seed=7), folder)


@pytest.mark.parametrize("policy", [Policy.full(), Policy.h2o(5, 4, 1)])
def test_nothing_differs_with_drafts(hybrid: Path, policy: Policy) -> None:
    random = np.random.default_rng(0)
    common: Any = {"policy": policy, "n_ctx": 100, "n_batch": 16, "max_sequences": 2}
    with (
        Generator(hybrid, threads=1, **common) as plain,
        Generator(hybrid, threads=2, draft=hybrid, draft_tokens=9, **common) as drafted,
    ):
        for seed in range(6):
            prompt = random.integers(3, 30, size=5).tolist() * int(random.integers(1, 4))
            options: Any = {
                "temperature": float(random.choice([0, 0.3])),
                "seed": seed,
                "max_tokens": 30,
                "ignore_eos": True,
                "constraint": only_some,
            }
            assert left(drafted, prompt, options) == left(plain, prompt, options)
        with drafted.engine() as engine:
            assert engine.stats().drafted_tokens > 0  # at first; later, as measured times allow


def test_texts_of_a_batch_have_their_own_drafts(hybrid: Path) -> None:
    prompts = [[5, 6, 7] * 4, [9, 8] * 5, [3]]
    options: Any = {"max_tokens": 25, "temperature": 0, "ignore_eos": True}
    common: Any = {"hh": 12, "n_ctx": 100, "max_sequences": 3, "threads": 2}
    with Generator(hybrid, **common) as plain, Generator(hybrid, draft="lookup", **common) as some:
        expected = [one.text for one in plain.generate(prompts, **options)]
        for _ in range(2):
            assert [one.text for one in some.generate(prompts, **options)] == expected


def test_lossless_is_refused(hybrid: Path) -> None:
    with pytest.raises(ValueError, match="recurrent"):
        Generator(hybrid, lossless=True)
