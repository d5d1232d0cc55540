"""Outputs with drafts equal those without, bit for bit, and the caches that they leave too."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_cpp import BUNDLED_MODEL, Generator, Policy
from h2o_cpp.cli import main
from support.outputs import N_VOCAB, OPTION_SETS, left, only_some
from support.random_search import examples
from support.random_texts import OPTIONS, POLICIES, PROTECTED

LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"
N_CTX = 40
PROMPT = "the cat sat on the mat. the cat sat on the mat. the cat sat on"


@settings(max_examples=examples(60))
@given(
    policy=st.one_of(POLICIES, OPTIONS, PROTECTED),
    unit=st.lists(st.integers(3, N_VOCAB - 1), min_size=1, max_size=8),
    repeated=st.integers(1, 4),
    requests=st.lists(OPTION_SETS, min_size=1, max_size=3),
    draft_max=st.integers(1, 20),
    threads=st.integers(1, 2),
    positions=st.sampled_from(["auto", "original"]),
)
def test_nothing_differs_with_drafts(
    policy: Policy,
    unit: list[int],
    repeated: int,
    requests: list[dict[str, Any]],
    draft_max: int,
    threads: int,
    positions: Any,
) -> None:
    prompt = unit * repeated
    common: Any = {
        "policy": policy, "n_ctx": N_CTX, "positions": positions, "max_sequences": 1, "n_batch": 16,
    }  # fmt: skip
    with (
        Generator(LLAMA, threads=1, **common) as plain,
        Generator(LLAMA, threads=threads, draft="lookup", draft_max=draft_max, **common) as drafted,
    ):
        for options in requests:
            assert left(drafted, prompt, options) == left(plain, prompt, options)


def test_repetitions_are_guessed() -> None:
    with Generator(BUNDLED_MODEL, hh=40, n_ctx=256, draft="lookup") as generator:
        result = generator.generate(PROMPT, max_tokens=100, temperature=0)
        assert result.accepted_tokens > 0  # later, as many as measured times allow
        assert result.drafted_tokens >= result.accepted_tokens
        assert result.completion_tokens == 100
        without = generator.generate(PROMPT, max_tokens=100, temperature=0, draft=False)
        assert (without.text, without.drafted_tokens) == (result.text, 0)


def test_nothing_differs_with_an_archive() -> None:
    common: Any = {
        "policy": Policy.h2o(8, 6, 2), "n_ctx": N_CTX, "n_batch": 16, "archive": "f16",
        "archive_pages": 1,
    }  # fmt: skip
    with (
        Generator(LLAMA, threads=1, **common) as plain,
        Generator(LLAMA, threads=2, draft="lookup", draft_max=5, **common) as drafted,
    ):
        for seed in range(10):
            prompt = [3 + seed, 4, 5] * 4
            options: dict[str, Any] = {
                "temperature": [0.0, 0.3][seed % 2], "seed": seed, "max_tokens": 26,
                "ignore_eos": True, "constraint": only_some,
            }  # fmt: skip
            assert left(drafted, prompt, options) == left(plain, prompt, options)
            assert drafted.stats().archive_bytes == plain.stats().archive_bytes > 0


def test_batches_count_their_drafts() -> None:
    with (
        Generator(BUNDLED_MODEL, hh=40, n_ctx=256) as plain,
        Generator(BUNDLED_MODEL, hh=40, n_ctx=256, draft="lookup", draft_max=8) as generator,
    ):
        prompts = [PROMPT, "Once upon a time", PROMPT[4:]]
        options: Any = {"max_tokens": 60, "temperature": 0.2, "seed": 1}
        expected = plain.generate(prompts, **options)
        results = generator.generate(prompts, **options)
        assert [one.text for one in results] == [one.text for one in expected]
        with generator.engine() as engine:
            stats = engine.stats()
        assert stats.drafted_tokens == sum(one.drafted_tokens for one in results)
        assert stats.accepted_tokens == sum(one.accepted_tokens for one in results)


def test_text_that_repeats_nothing_has_few_drafts() -> None:
    words = Counter[str]()
    random = np.random.default_rng(0)
    with Generator(LLAMA, n_ctx=N_CTX, draft="lookup") as generator:
        for seed in range(10):
            prompt = random.integers(3, N_VOCAB, 5).tolist()
            result = generator.generate(
                prompt, max_tokens=30, temperature=5, top_k=0, top_p=1, min_p=0, seed=seed
            )
            words["drafted"] += result.drafted_tokens
            words["all"] += result.completion_tokens
    assert words["drafted"] < words["all"] / 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": LLAMA}, "has another vocabulary: token 4 is 'a', expected '!'"),
        ({"draft": LLAMA, "draft_tokens": 0}, "draft_tokens=0"),
        ({"draft": "lookup", "draft_max": 0}, "draft_max=0"),
    ],
)
def test_refused_options(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Generator(BUNDLED_MODEL, **options)


def test_a_draft_model_that_is_missing() -> None:
    with pytest.raises(FileNotFoundError, match=r"no\.gguf"):
        Generator(BUNDLED_MODEL, draft="no.gguf")


@pytest.mark.parametrize("draft_tokens", [4, 512])
def test_a_draft_model_changes_nothing(draft_tokens: int) -> None:
    common: Any = {"hh": 40, "n_ctx": 256, "n_batch": 32}
    options: Any = {"max_tokens": 60, "seed": 1, "temperature": [0, 0.5][draft_tokens == 4]}
    prompts = [PROMPT, "Once upon a time", PROMPT[4:] + PROMPT]
    with Generator(BUNDLED_MODEL, **common) as plain:
        expected = [one.text for one in plain.generate(prompts, **options)]
    with Generator(
        BUNDLED_MODEL, draft=BUNDLED_MODEL, draft_tokens=draft_tokens, **common
    ) as generator:
        drafted = generator.generate(prompts[0], **options)
        assert drafted.text == expected[0]
        assert drafted.drafted_tokens > 0  # at first; later, as measured times allow
        results = generator.generate(prompts, **options)
        assert [one.text for one in results] == expected
        alone = generator.generate(prompts[0], draft=False, **options)
        assert (alone.text, alone.drafted_tokens) == (expected[0], 0)
        assert generator.stats().draft_bytes > 0


def test_drafts_of_lookup_take_no_cache_of_their_own() -> None:
    with Generator(BUNDLED_MODEL, hh=40, n_ctx=256, draft="lookup") as generator:
        assert generator.stats().draft_bytes == 0


def test_refused_option_of_a_stream() -> None:
    with Generator(BUNDLED_MODEL) as generator, pytest.raises(TypeError, match="draft"):
        generator.stream("a", draft="lookup")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "option", [["--draft", "lookup"], ["--spec-type", "ngram-simple", "--draft-n", "4"]]
)
def test_the_command_has_drafts(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", PROMPT, "-n", "40", "--temp", "0"]
    assert main(command) == 0
    expected = capsys.readouterr().out
    assert main([*command, *option]) == 0
    assert capsys.readouterr().out == expected
