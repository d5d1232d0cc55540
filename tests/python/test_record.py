"""The record of an Engine: log-probabilities, kept tokens and counters."""

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
    """In Python floats with an exact sum."""
    values = [float(x) for x in row]
    maximum = max(values)
    normalizer = maximum + log(fsum(exp(x - maximum) for x in values))
    return [x - normalizer for x in values]


def submit_all(generator: Generator, records: list[Record | None]) -> list[Completion]:
    with generator.engine() as engine:
        completions = [
            engine.submit(prompt, record=record, **OPTIONS)
            for prompt, record in zip(PROMPTS, records, strict=True)
        ]
        for completion in completions:
            completion.result()
    return completions


def test_recording_does_not_change_outputs(generator: Generator) -> None:
    plain = submit_all(generator, [None] * 3)
    some = [Record(n_top=2, prompt=True, kept_every=1), None, Record(n_top=0, prompt=True)]
    recorded = submit_all(generator, some)
    assert [entry.tokens for entry in recorded] == [entry.tokens for entry in plain]


def test_logprobs_equal_log_softmax_of_the_logits(generator: Generator, llama: Path) -> None:
    records = [Record(n_top=3, prompt=True) for _ in PROMPTS]
    completions = submit_all(generator, [*records])
    for prompt, record, completion in zip(PROMPTS, records, completions, strict=True):
        tokens = [*prompt, *completion.tokens]
        # The prompt in chunks of n_batch, then one token at a time, as in generation.
        model = _core.Model(llama, device="cpu", threads=1)
        session = open_session(model, BUDGET["policy"], n_ctx=model.n_ctx_train, n_batch=5)
        cuts = [*range(0, len(prompt), 5), *range(len(prompt), len(tokens))]
        parts = [np.array(part, np.int32) for part in np.split(tokens, cuts[1:])]
        rows = np.concatenate([session.score(0, part) for part in parts])
        assert [entry.token for entry in record.logprobs] == tokens[1:]
        for token, found, row in zip(tokens[1:], record.logprobs, rows, strict=False):
            expected = log_softmax(row)
            # Values below 64 in float64: a few rounding errors of 2**-47 each.
            assert found.logprob == pytest.approx(expected[token], rel=0, abs=1e-12)
            most_likely = sorted(range(len(expected)), key=lambda i: -expected[i])[:3]
            assert [i for i, _ in found.top] == most_likely
            assert found.top[0][1] == max(value for _, value in found.top)


def test_record_contains_only_what_was_requested(generator: Generator) -> None:
    records = [Record(), Record(n_top=0), Record(kept_every=5)]
    completions = submit_all(generator, [*records])
    assert records[0].logprobs == records[2].logprobs == []
    assert [entry.token for entry in records[1].logprobs] == [*completions[1].tokens]
    assert {entry.top for entry in records[1].logprobs} == {()}
    assert records[0].kept is records[1].kept is None


def test_n_top_is_limited_by_the_vocabulary(generator: Generator) -> None:
    record = Record(n_top=99)
    with generator.engine() as engine:
        engine.submit([5], record=record, **(OPTIONS | {"max_tokens": 1})).result()
    [found] = record.logprobs
    assert len(found.top) == generator.n_vocab
    assert fsum(exp(value) for _, value in found.top) == pytest.approx(1, abs=1e-12)
    assert [*found.top] == sorted(found.top, key=lambda entry: (-entry[1], entry[0]))


def test_kept_shares_equal_those_of_a_generator(generator: Generator, llama: Path) -> None:
    """After the output, whose last token has not been processed."""
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


@pytest.mark.parametrize("every", [1, 4, 12, 100])
def test_kept_is_updated_every_kept_every_tokens(generator: Generator, every: int) -> None:
    """After the first of 12 generated tokens, when the 3 prompt tokens have been processed, then
    every `every` tokens, and at the end."""
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
    assert {*seen} <= {*range(3, 14, every), 14}
    assert record.kept is not None
    assert len(record.kept.shares) == 14


def test_every_token_recalls_the_pages_that_it_may(tiny_opt: Path) -> None:
    """Each recalls one page in each KV head, once all heads have evicted tokens; the second output
    begins in the stored prompt of the first.
    """
    options: dict[str, Any] = {"hh": 6, "archive": "f16", "archive_pages": 1}
    prompt = "The old man and the sea " * 9
    with Generator(tiny_opt, threads=1, **options) as generator, generator.engine() as engine:
        for i in range(2):
            record = Record(kept_every=1000)
            result = engine.submit(prompt, record=record, max_tokens=40).result()
            assert (result.cached_tokens > 0) == (i > 0)
            assert record.kept is not None
            recalls = record.kept.recalls
            assert len(recalls) == len(record.kept.shares)
            pages = [recalls[i : i + 16] for i in range(0, len(recalls), 16)]
            assert all((page == page[0]).all() for page in pages)
            assert sum(page[0] for page in pages) == pytest.approx(1)


def test_n_read_counts_the_tokens_of_the_pieces(tiny_opt: Path) -> None:
    """A stop string holds text back; its tokens count with the piece that contains the text."""
    with Generator(tiny_opt, threads=1) as generator, generator.engine() as engine:
        record = Record(n_top=0)
        options: dict[str, Any] = {"max_tokens": 40, "seed": 1, "stop": "\0never"}
        completion = engine.submit("The old man", record=record, **options)
        text, n = "", 0
        for piece in completion:
            text += piece
            n = completion.n_read
            assert generator.detokenize([entry.token for entry in record.logprobs[:n]]) == text
        assert completion.n_read == len(completion.tokens) == len(record.logprobs)


def test_stats_count_tokens_and_evictions(generator: Generator) -> None:
    with generator.engine() as engine:
        completions = [engine.submit(prompt, **OPTIONS) for prompt in PROMPTS]
        for completion in completions:
            completion.result()
        stats = engine.stats()
        assert stats.n_sequences == 3
        assert stats.n_waiting == 0
        assert stats.prompt_tokens == sum(map(len, PROMPTS))
        assert stats.generated_tokens == 3 * 12
        # All tokens but each output's last have been processed; 7 are kept per sequence.
        assert stats.evictions == sum(len(prompt) + 11 - 7 for prompt in PROMPTS)
        assert not engine.closed
    assert engine.closed


def test_record_of_another_sequence_is_rejected(generator: Generator) -> None:
    record = Record(n_top=0)
    with generator.engine() as engine:
        engine.submit(PROMPTS[0], record=record, **OPTIONS).result()
        with pytest.raises(ValueError, match="data of another sequence, expected a new one"):
            engine.submit(PROMPTS[1], record=record, **OPTIONS)
    assert len(record.logprobs) == OPTIONS["max_tokens"]


@pytest.mark.parametrize("options", [{"n_top": -1}, {"prompt": True}, {"kept_every": 0}])
def test_invalid_records(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Record(**options)
