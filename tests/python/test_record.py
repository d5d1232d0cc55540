"""Data that an Engine records: log-probabilities and kept tokens; and its counters."""

from __future__ import annotations

from math import exp, fsum, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Completion, Generator, Policy, Record, _core
from h2o_cpp.model.session import open_session

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20] * 3, [33, 9, 60, 4, 4, 4, 17, 58, 9, 21, 22, 23]]
OPTIONS: dict[str, Any] = {"max_tokens": 12, "seed": 4, "ignore_eos": True}
BUDGET: dict[str, Any] = {"policy": Policy.h2o(3, 4), "n_batch": 5, "threads": 1}


@pytest.fixture(scope="module")
def llama(data: Path) -> Path:
    return data / "golden" / "llama_gqa2_tied.gguf"


@pytest.fixture
def generator(llama: Path) -> Generator:
    return Generator(llama, max_sequences=3, **BUDGET)


def log_softmax(row: Any) -> list[float]:
    """In the arithmetic of Python, whose sum is exact."""
    values = [float(x) for x in row]
    most = max(values)
    normaliser = most + log(fsum(exp(x - most) for x in values))
    return [x - normaliser for x in values]


def submit_all(generator: Generator, records: list[Record | None]) -> list[Completion]:
    with generator.engine() as engine:
        completions = [
            engine.submit(prompt, record=record, **OPTIONS)
            for prompt, record in zip(PROMPTS, records, strict=True)
        ]
        for completion in completions:
            completion.result()
    return completions


def test_texts_that_are_recorded_are_the_same(generator: Generator) -> None:
    plain = submit_all(generator, [None] * 3)
    some = [Record(n_top=2, prompt=True, kept_every=1), None, Record(n_top=0, prompt=True)]
    recorded = submit_all(generator, some)
    assert [one.tokens for one in recorded] == [one.tokens for one in plain]


def test_log_probabilities_are_those_of_the_logits(generator: Generator, llama: Path) -> None:
    records = [Record(n_top=3, prompt=True) for _ in PROMPTS]
    completions = submit_all(generator, [*records])
    for prompt, record, completion in zip(PROMPTS, records, completions, strict=True):
        tokens = [*prompt, *completion.tokens]
        # The prompt in its chunks, then token by token, as it was generated.
        model = _core.Model(llama, device="cpu", threads=1)
        session = open_session(model, BUDGET["policy"], n_ctx=model.n_ctx_train, n_batch=5)
        cuts = [*range(0, len(prompt), 5), *range(len(prompt), len(tokens))]
        parts = [np.array(part, np.int32) for part in np.split(tokens, cuts[1:])]
        rows = np.concatenate([session.score(0, part) for part in parts])
        assert [one.token for one in record.logprobs] == tokens[1:]
        for token, found, row in zip(tokens[1:], record.logprobs, rows, strict=False):
            expected = log_softmax(row)
            # Values below 64 in float64: a handful of roundings of 2**-47 each.
            assert found.logprob == pytest.approx(expected[token], rel=0, abs=1e-12)
            likeliest = sorted(range(len(expected)), key=lambda i: -expected[i])[:3]
            assert [i for i, _ in found.top] == likeliest
            assert found.top[0][1] == max(value for _, value in found.top)


def test_only_what_is_asked_for_is_recorded(generator: Generator) -> None:
    records = [Record(), Record(n_top=0), Record(kept_every=5)]
    completions = submit_all(generator, [*records])
    assert records[0].logprobs == records[2].logprobs == []
    assert [one.token for one in records[1].logprobs] == [*completions[1].tokens]
    assert {one.top for one in records[1].logprobs} == {()}
    assert records[0].kept is records[1].kept is None


def test_likeliest_are_no_more_than_the_vocabulary(generator: Generator) -> None:
    record = Record(n_top=99)
    with generator.engine() as engine:
        engine.submit([5], record=record, **(OPTIONS | {"max_tokens": 1})).result()
    [found] = record.logprobs
    assert len(found.top) == generator.n_vocab
    assert fsum(exp(value) for _, value in found.top) == pytest.approx(1, abs=1e-12)
    assert [*found.top] == sorted(found.top, key=lambda one: (-one[1], one[0]))


def test_what_is_kept_is_what_a_generator_keeps(generator: Generator, llama: Path) -> None:
    """At the end of the text, whose last token has not been read."""
    records = [Record(kept_every=1000) for _ in PROMPTS]
    submit_all(generator, [*records])
    for prompt, record in zip(PROMPTS, records, strict=True):
        with Generator(llama, **BUDGET) as alone:
            alone.generate(prompt, **OPTIONS)
            stats = alone.stats()
            heads = [(i, j) for i in range(stats.n_layers) for j in range(stats.n_kv_heads)]
            positions = np.concatenate([alone.kept(*head)[0] for head in heads])
            counts = np.bincount(positions, minlength=stats.tokens_seen)
        assert record.kept is not None
        assert record.kept.tokens_kept == stats.tokens_kept == 7
        np.testing.assert_allclose(record.kept.shares, counts / len(heads), rtol=1e-6)


@pytest.mark.parametrize(("every", "n"), [(4, 13), (1, 14), (100, 14), (12, 14)])
def test_what_is_kept_is_looked_at_again_and_again(
    generator: Generator, every: int, n: int
) -> None:
    """After the first of 12 tokens, when the 3 of the prompt have been read, then every so many
    tokens; at the end only if it comes by itself."""
    record = Record(kept_every=every)
    seen = []
    stream = generator.stream(PROMPTS[1], **OPTIONS)
    del stream
    with generator.engine() as engine:
        completion = engine.submit(PROMPTS[1], record=record, **OPTIONS)
        for _ in completion:
            kept = record.kept
            assert kept is not None
            seen.append(len(kept.shares))
    assert seen == sorted(seen)
    assert record.kept is not None
    assert len(record.kept.shares) == 14


def test_pieces_say_of_how_many_tokens_they_are_made(tiny_opt: Path) -> None:
    """A stop string holds text back, whose tokens belong to the piece that it comes with."""
    with Generator(tiny_opt, threads=1) as generator, generator.engine() as engine:
        record = Record(n_top=0)
        options: dict[str, Any] = {"max_tokens": 40, "seed": 1, "stop": "\0never"}
        completion = engine.submit("The old man", record=record, **options)
        text, n = "", 0
        for piece in completion:
            text += piece
            n = completion.n_read
            assert generator.detokenize([one.token for one in record.logprobs[:n]]) == text
        assert completion.n_read == len(completion.tokens) == len(record.logprobs)


def test_stats_count_what_was_done(generator: Generator) -> None:
    with generator.engine() as engine:
        completions = [engine.submit(prompt, **OPTIONS) for prompt in PROMPTS]
        for completion in completions:
            completion.result()
        stats = engine.stats()
        assert stats.n_sequences == 3
        assert stats.n_waiting == 0
        assert stats.prompt_tokens == sum(map(len, PROMPTS))
        assert stats.generated_tokens == 3 * 12
        # All have been read but each text's last token, and 7 are kept of each.
        assert stats.evictions == sum(len(prompt) + 11 - 7 for prompt in PROMPTS)
        assert not engine.closed
    assert engine.closed


@pytest.mark.parametrize("options", [{"n_top": -1}, {"prompt": True}, {"kept_every": 0}])
def test_records_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Record(**options)
