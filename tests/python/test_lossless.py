"""With lossless, outputs and caches are those of the full cache, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_cpp import BUNDLED_MODEL, Chat, Generator, Policy
from h2o_cpp.cli import main
from support.outputs import N_VOCAB, OPTION_SETS, left
from support.random_search import examples

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
LLAMA = GOLDEN / "llama_gqa2_tied.gguf"
PROMPT = "the cat sat on the mat. the cat sat on the mat. the cat sat on"
N_CTX = 40

BUDGETS = st.one_of(
    st.builds(Policy.h2o, st.integers(1, 6), st.integers(1, 6), sinks=st.integers(0, 2)),
    st.builds(Policy.sinks, st.integers(0, 3), st.integers(1, 6)),
)


@settings(max_examples=examples(40))
@given(
    policy=BUDGETS,
    kv_dtype=st.sampled_from(["f16", "f32", "bf16"]),
    prompt=st.lists(st.integers(3, N_VOCAB - 1), min_size=1, max_size=30),
    requests=st.lists(OPTION_SETS, min_size=1, max_size=3),
    draft_max=st.integers(1, 20),
    threads=st.integers(1, 2),
)
def test_nothing_differs_from_the_full_cache(
    policy: Policy,
    kv_dtype: Any,
    prompt: list[int],
    requests: list[dict[str, Any]],
    draft_max: int,
    threads: int,
) -> None:
    common: Any = {"n_ctx": N_CTX, "n_batch": 16, "max_sequences": 1, "kv_dtype": kv_dtype}
    lossless: Any = {"lossless": True, "policy": policy, "draft_max": draft_max}
    with (
        Generator(LLAMA, threads=1, **common) as full,
        Generator(LLAMA, threads=threads, **lossless, **common) as generator,
    ):
        assert generator.policy == full.policy
        for options in requests:
            assert left(generator, prompt, options) == left(full, prompt, options)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_batches_and_their_drafts(temperature: float) -> None:
    prompts = [PROMPT, "Once upon a time", PROMPT[4:] + PROMPT]
    options: Any = {"max_tokens": 60, "temperature": temperature, "seed": 1, "stop": ["zzz"]}
    with Generator(BUNDLED_MODEL, n_ctx=256) as full:
        expected = full.generate(prompts, **options)
    with Generator(BUNDLED_MODEL, n_ctx=256, lossless=True, hh=12, recent=6) as generator:
        first = generator.generate(prompts[0], **options)
        assert first.text == expected[0].text
        assert first.drafted_tokens > 0  # at first; later, as measured times allow
        results = generator.generate(prompts, **options)
        assert [one.text for one in results] == [one.text for one in expected]
        plain = generator.generate(prompts[0], draft=False, **options)
        assert (plain.text, plain.drafted_tokens) == (expected[0].text, 0)
        stats = generator.stats()
        assert stats.draft_bytes > 0
        with generator.engine() as engine:
            assert engine.stats().draft_bytes == stats.draft_bytes


def test_conversations_reuse_the_full_cache() -> None:
    replies: list[list[str]] = []
    cached: list[int] = []
    lossless: Any = {"lossless": True, "hh": 16}
    each: tuple[Any, ...] = ({}, lossless)
    for options in each:
        with Generator(BUNDLED_MODEL, n_ctx=256, **options) as generator:
            chat = Chat(generator, template="chatml")
            said = ("The cat?", "And the dog?")
            replies.append(["".join(chat.say(x, max_tokens=20, temperature=0)) for x in said])
            with generator.engine() as engine:
                cached.append(engine.stats().cached_tokens)
    assert replies[0] == replies[1]
    assert cached[0] == cached[1]


def test_an_output_that_is_left_early() -> None:
    with (
        Generator(BUNDLED_MODEL, n_ctx=256) as full,
        Generator(BUNDLED_MODEL, n_ctx=256, lossless=True, hh=12) as generator,
    ):
        for _ in range(3):
            stream = generator.stream(PROMPT, max_tokens=50, temperature=0)
            next(stream)
            stream.close()
        expected = full.generate(PROMPT, max_tokens=50, temperature=0).text
        assert generator.generate(PROMPT, max_tokens=50, temperature=0).text == expected


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (BUNDLED_MODEL, {"draft": "lookup"}, "draft='lookup' cannot be combined with lossless"),
        (BUNDLED_MODEL, {"hh": 20, "archive": "f16"}, "archive"),
        (BUNDLED_MODEL, {"hh": 20, "policy": "contribution"}, "weighs values"),
        (LLAMA, {"hh": 20, "positions": "rolling"}, "roll"),
        (GOLDEN / "gemma2.gguf", {}, "window"),
    ],
)
def test_refused_options(model: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Generator(model, lossless=True, **options)


def test_the_command_has_lossless(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", PROMPT, "-n", "40", "--temp", "0"]
    assert main(command) == 0
    expected = capsys.readouterr().out
    assert main([*command, "--lossless", "--hh", "12"]) == 0
    assert capsys.readouterr().out == expected
