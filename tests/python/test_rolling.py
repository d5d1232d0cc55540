"""Rolling positions: texts longer than the trained length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from h2o_cpp import Generator, Policy, _core
from h2o_cpp.arguments import Positions
from h2o_cpp.generation.request import StreamOptions
from h2o_cpp.model.session import chunks, open_session
from support.llama_rules import ReferenceLlama
from support.needs import LINUX, PLAIN_MEMORY

N_TRAIN = 40  # positions of the golden models
N_VOCAB = 61


def random_tokens(seed: int, n: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, N_VOCAB, n).astype(np.int32)


@pytest.mark.parametrize(
    ("n_batch", "positions"), [(1, "auto"), (7, "rolling"), (64, "auto"), (64, "rolling")]
)
@pytest.mark.parametrize(
    "policy",
    [
        Policy.h2o(6, 8),
        Policy.h2o(4, 4, sinks=2, score="mean"),
        Policy.window(9),
        Policy.sinks(2, 30),
    ],
    ids=str,
)
def test_logits_equal_the_reference(
    llama: Path, llama_model: _core.Model, policy: Policy, n_batch: int, positions: Positions
) -> None:
    """Up to and far beyond the trained length, in chunks as the session accepts them."""
    session = open_session(
        llama_model, policy, n_ctx=N_TRAIN, n_batch=n_batch, kv_dtype="f32", positions=positions
    )
    reference = ReferenceLlama(llama, policy, rolls_at=N_TRAIN if positions == "auto" else 0)
    lengths = []
    for part in chunks(session, random_tokens(3, 110)):
        logits = session.score(0, part)
        expected = reference.step(part.tolist())
        lengths.append(len(part))
        # No near ties in what to evict; the error of float32 is about 1e-6 here, see
        # random_models.float32_tolerance.
        assert reference.margin > 1e-5
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)
    assert sum(lengths) == 110 == session.tokens_seen(0)
    budget = policy.budget
    assert budget is not None
    assert max(lengths) <= min(n_batch, N_TRAIN)
    assert session.rolling(0)
    if n_batch == 64 and positions == "auto":
        # Up to the trained length nothing changes; then a chunk's last rank is a trained position.
        assert lengths[:2] == [N_TRAIN, N_TRAIN - budget]


def test_endless_generators_read_texts_longer_than_n_ctx(llama: Path) -> None:
    text = random_tokens(3, 110)
    with Generator(llama, hh=8, n_ctx=N_TRAIN, threads=1) as generator:
        assert generator.endless
        assert generator.logits(text).shape == (110, N_VOCAB)
        assert generator.generate(text.tolist(), max_tokens=3).prompt_tokens == 110


def test_auto_is_original_up_to_the_trained_length(llama_model: _core.Model) -> None:
    tokens = random_tokens(4, N_TRAIN)
    both = [
        open_session(llama_model, Policy.h2o(6, 8), n_ctx=N_TRAIN, n_batch=1, positions=positions)
        for positions in ("auto", "original")
    ]
    for token in tokens:
        auto, original = (session.step([(0, np.array([token]))]) for session in both)
        np.testing.assert_array_equal(auto, original)
    assert not both[0].rolling(0)
    with pytest.raises(ValueError, match=r"room for 0 \(n_ctx 40\)"):
        both[1].step([(0, tokens[:1])])
    both[0].step([(0, tokens[:1])])
    assert both[0].rolling(0)
    both[0].reset(0)
    assert not both[0].rolling(0)


def test_step_cannot_cross_the_trained_length(llama_model: _core.Model) -> None:
    session = open_session(llama_model, Policy.window(30), n_ctx=N_TRAIN, n_batch=64)
    assert session.chunk(0) == N_TRAIN
    with pytest.raises(ValueError, match="41 tokens of sequence 0 in one step, it can take 40"):
        session.step([(0, random_tokens(1, 41))])
    assert session.tokens_seen(0) == 0
    session.step([(0, random_tokens(1, 40))])
    assert session.chunk(0) == 10  # ranks 30 to 39


@pytest.mark.parametrize(
    ("positions", "policy", "message"),
    [
        ("rolling", Policy.full(), "keeps fewer tokens than 40"),
        ("rolling", Policy.h2o(20, 20), "keeps fewer tokens than 40"),
        ("relative", Policy.window(4), "expected 'auto', 'original' or 'rolling'"),
    ],
)
def test_invalid_rolling_options(
    llama_model: _core.Model, positions: Positions, policy: Policy, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_session(llama_model, policy, n_ctx=N_TRAIN, n_batch=1, positions=positions)


def test_full_cache_stops_at_n_ctx(llama: Path) -> None:
    with Generator(llama) as full, Generator(llama, hh=1.0) as all_kept:
        for generator in (full, all_kept):
            assert not generator.endless
            generation = generator.generate([5] * 10, temperature=0, ignore_eos=True)
            assert generation.completion_tokens == N_TRAIN - 10 + 1  # the last is not fed back
            stream = generator.stream([5] * 10, temperature=0, ignore_eos=True)
            list(stream)
            assert stream.finish_reason == "length"
            assert "n_ctx is 40; generation continues past it only if the policy evicts" in (
                stream.finish_message
            )


def test_learned_positions_stop_at_n_ctx(tiny_opt: Path) -> None:
    with Generator(tiny_opt, hh=8, n_batch=2048) as generator:
        assert not generator.endless
        stream = generator.stream([5] * 2040, temperature=0, ignore_eos=True)
        list(stream)
        assert stream.finish_reason == "length"
        assert len(stream.tokens) == 9
        assert stream.finish_message == (
            "the context is full: n_ctx is 2048, and the model has learned no positions after that"
        )
        with pytest.raises(ValueError, match="2049 tokens, n_ctx is 2048, and the model has lear"):
            generator.stream([5] * 2049)
    with pytest.raises(ValueError, match="opt has no rotary positions"):
        Generator(tiny_opt, hh=0.2, positions="rolling")


def test_prompt_longer_than_n_ctx(llama: Path) -> None:
    """A model of 40 positions reads a prompt of 400 tokens in chunks."""
    prompt = [int(t) for t in random_tokens(7, 400)]
    with Generator(llama, hh=0.5, kv_dtype="f32") as generator:
        assert generator.endless
        stream = generator.stream(prompt, max_tokens=5, temperature=0, ignore_eos=True)
        list(stream)
        reference = ReferenceLlama(llama, Policy.h2o(10, 10), rolls_at=N_TRAIN)
        logits = reference.step(prompt[:40])
        done = 40
        while done < len(prompt):
            logits = reference.step(prompt[done : done + 20])
            done += 20
        assert reference.margin > 1e-5
        tokens = []
        for _ in range(5):
            tokens.append(int(logits[-1].argmax()))
            logits = reference.step(tokens[-1:])
        assert stream.tokens.tolist() == tokens
        assert generator.logits(prompt[:100]).shape == (100, N_VOCAB)


def test_default_max_tokens_is_n_ctx(llama: Path) -> None:
    """Wherever in the sequence the output begins."""
    prompt = [5, 6, 7]
    options: StreamOptions = {"ignore_eos": True, "seed": 1}
    with Generator(llama, hh=0.5) as generator:
        expected = generator.generate(prompt, **options)
        assert (expected.completion_tokens, expected.finish_reason) == (N_TRAIN, "length")
        assert expected.finish_message == ("max_tokens is 40 (n_ctx) by default; -1 has no limit")
        stream = generator.stream(prompt, **options)
        list(stream)
        many = generator.generate([prompt], **options)
        with generator.engine() as engine:
            submitted = engine.submit(prompt, **options).result()
        conversation = generator.chat(
            [{"role": "user", "content": "ab"}], template="{{ messages[0].content }}", **options
        )
        list(conversation)
        generations = (stream.generation(), *many, submitted)
        assert [text.text for text in generations] == [expected.text] * 3
        assert len(conversation.tokens) == N_TRAIN
        assert {text.finish_message for text in generations} == {expected.finish_message}
        assert conversation.finish_message == expected.finish_message
        long = generator.generate([5] * 100, ignore_eos=True)
        assert long.completion_tokens == N_TRAIN


def test_max_tokens_minus_1_continues_past_n_ctx(llama: Path) -> None:
    options: StreamOptions = {"ignore_eos": True, "max_tokens": -1}
    with Generator(llama, hh=0.5) as generator:
        stream = generator.stream([5, 6, 7], **options)
        while len(stream.tokens) < 4 * N_TRAIN:
            next(stream)
        assert stream.finish_reason is None
    with Generator(llama) as full:
        assert full.generate([5, 6, 7], **options).completion_tokens == N_TRAIN - 3 + 1


SOAK = """
import sys
import numpy as np
from h2o_cpp import Generator
from h2o_cpp.measure.machine import rss_bytes

with Generator(sys.argv[1], hh=0.5) as g:
    endless = {"max_tokens": -1, "ignore_eos": True}
    stream = g.stream([5] * 10, temperature=1.0, top_p=1, seed=1, **endless)
    cache_bytes = g.stats().cache_bytes
    for n, _ in enumerate(stream):
        if n % 100 == 0 and len(stream.tokens) >= 2000:
            break
    before = rss_bytes()
    for n, _ in enumerate(stream):
        if n % 100 == 0 and len(stream.tokens) >= 20000:
            break
    grown = rss_bytes() - before
    # The output grows by 18,000 tokens, stored twice, and their text; a full cache by 3.4 MB.
    assert grown < 1.5 * 2**20, grown
    stats = g.stats()
    assert stats.cache_bytes == cache_bytes
    assert (stats.tokens_seen >= 20000, stats.tokens_kept) == (True, 20)
    for head in range(2):
        positions, scores = g.kept(0, head)
        assert len(positions) == 20
        assert np.isfinite(scores).all()
    # A random model keeps sampling nearly uniformly, however long the output is.
    assert len(set(stream.tokens[-2000:])) > g.n_vocab // 2
"""


@LINUX  # resident memory is read from /proc
@PLAIN_MEMORY
def test_memory_does_not_grow(llama: Path) -> None:
    """20,000 tokens through 20 slots: constant memory, finite logits."""
    subprocess.run([sys.executable, "-c", SOAK, llama], check=True)
