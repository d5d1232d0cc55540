"""Batched generation equals generation of each prompt alone, bit for bit."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from h2o_cpp import Generator, Policy, Snapshot, _core
from h2o_cpp.budget.policy import POLICIES, named_policy
from h2o_cpp.generation.request import make_request
from support.random_search import examples

MODELS = ["opt_untied", "llama_gqa2_tied", "gptneox", "qwen3"]
N_CTX = 40  # of the golden models
N_VOCAB = 61
GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def golden(name: str) -> Path:
    return GOLDEN / f"{name}.gguf"


def random_requests(seed: int, n: int = 9) -> list[tuple[list[int], dict[str, Any]]]:
    """Random prompts of 1 to 30 tokens, with their options."""
    rng = random.Random(seed)
    requests = []
    for i in range(n):
        prompt = [rng.randrange(3, N_VOCAB) for _ in range(rng.randint(1, 30))]
        options: dict[str, Any] = {"max_tokens": rng.randint(1, 25), "seed": i}
        options["ignore_eos"] = i % 2 == 0
        options["temperature"] = rng.choice([0.0, 0.7, 1.5])
        requests.append((prompt, options))
    return requests


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["full", "layers", *POLICIES])
def test_batched_equals_alone(model: str, name: str) -> None:
    """With n_batch=5, prompts are split, evicted from, and wait for space in a batch."""
    policy: Policy | list[Policy]
    if name == "full":
        policy = Policy.full()
    elif name == "layers":
        n_layers = 3 if model == "opt_untied" else 2
        policy = [Policy.h2o(3, 4), Policy.window(9), Policy.h2o(5, 2)][:n_layers]
    else:
        policy = named_policy(name, 8)
    options: dict[str, Any] = {"policy": policy, "n_batch": 5, "threads": 1}
    requests = random_requests(7)
    with Generator(golden(model), **options) as alone:
        streams = [alone.stream(prompt, **own) for prompt, own in requests]
        texts = ["".join(stream) for stream in streams]
    with Generator(golden(model), max_sequences=4, **options) as generator:
        prompts, each = [[*part] for part in zip(*requests, strict=True)]
        assert [result.text for result in generator.generate(prompts, each=each)] == texts
        with generator.engine() as engine:
            completions = [engine.submit(prompt, **own) for prompt, own in requests]
            for completion, stream, text in zip(completions, streams, texts, strict=True):
                generation = completion.result()
                assert completion.tokens == stream.tokens
                assert generation.text == text
                assert generation.finish_reason == stream.finish_reason
                assert generation.finish_message == stream.finish_message
                assert generation.prompt_tokens == stream.prompt_tokens
        one_by_one = [generator.generate(prompt, **own).text for prompt, own in requests]
        assert one_by_one == texts
        tokens = requests[0][0]
        with Generator(golden(model), **options) as alone:
            np.testing.assert_array_equal(generator.logits(tokens), alone.logits(tokens))


@pytest.mark.parametrize("positions", ["auto", "rolling"])
def test_rolling_positions_batched_equals_alone(positions: Any) -> None:
    """Beyond n_ctx, where a step takes fewer tokens of a sequence."""
    options: dict[str, Any] = {"policy": Policy.h2o(6, 8), "n_batch": 64, "threads": 1}
    options["positions"] = positions
    requests = [(prompt * 4, {**own, "max_tokens": 50}) for prompt, own in random_requests(3, 5)]
    with Generator(golden("llama_gqa2_tied"), **options) as alone:
        expected = [alone.generate(prompt, **own).text for prompt, own in requests]
    with Generator(golden("llama_gqa2_tied"), max_sequences=3, **options) as generator:
        prompts, each = [[*part] for part in zip(*requests, strict=True)]
        assert [result.text for result in generator.generate(prompts, each=each)] == expected


def test_batched_after_snapshot_equals_alone(tiny_opt: Path) -> None:
    with Generator(tiny_opt, hh=30, n_ctx=300, max_sequences=2, threads=1) as generator:
        system = generator.read("The old man looked at the sea, and after a time he said:")
        options: list[Any] = [{"seed": n} for n in range(4)]
        questions = [" Listen", " I", " My boy", " Then"]
        together = generator.generate(questions, after=system, each=options, max_tokens=20)
        alone = [
            generator.generate(question, after=system, max_tokens=20, **own)
            for question, own in zip(questions, options, strict=True)
        ]
        assert [result.text for result in together] == [result.text for result in alone]
        assert [x.prompt_tokens for x in together] == [x.prompt_tokens for x in alone]


# ---- Random arrivals, cancellations and stop rules ----

STEPPED = golden("llama_gqa2_tied")
OPTIONS: dict[str, Any] = {"n_batch": 6, "threads": 1}
SLAB = Policy.h2o(8, 8, value_norm="l1")  # the policies of OWN fit in it
OWN = [None, Policy.h2o(3, 3), Policy.window(10), Policy.h2o(4, 4, score="mean"), SLAB]
STOPS = [None, "a", ["b", "<s>"], "a<pad>"]

prompts = st.lists(st.integers(3, N_VOCAB - 1), min_size=1, max_size=60).map(tuple)


@cache
def generator_of(policy: Policy) -> Generator:
    return Generator(STEPPED, policy=policy, **OPTIONS)


@cache
def alone(
    prompt: tuple[int, ...], policy: Policy | None, items: tuple[tuple[str, Any], ...]
) -> tuple[list[int], str, str | None]:
    """Tokens, text and finish reason of a prompt alone."""
    stream = generator_of(SLAB if policy is None else policy).stream(prompt, **dict(items))
    text = "".join(stream)
    return list(stream.tokens), text, stream.finish_reason


class Streaming(RuleBasedStateMachine):
    """One thread reads concurrent generations in random order, with three sequences for all."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Generator(STEPPED, policy=SLAB, max_sequences=3, **OPTIONS)
        self.runtime = self.generator._runtime()
        self.running: list[tuple[_core.Generation, Any]] = []

    @precondition(lambda self: len(self.running) < 6)
    @rule(
        prompt=prompts,
        policy=st.sampled_from(OWN),
        n=st.integers(1, 30),
        seed=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        stop=st.sampled_from(STOPS),
    )
    def arrive(self, prompt: Any, policy: Any, stop: Any, n: int, **options: Any) -> None:
        stop = tuple(stop) if isinstance(stop, list) else stop
        options |= {"max_tokens": n, "stop": stop}
        own: Any = options
        request = replace(make_request(self.runtime, random.Random(0), prompt, own), policy=policy)
        arguments = (prompt, policy, tuple(options.items()))
        self.running.append((request.submit(self.runtime.engine), arguments))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5), n=st.integers(1, 12))
    def read(self, which: int, n: int) -> None:
        state, arguments = self.running[which % len(self.running)]
        for _ in range(n):
            if state.next() is None:
                self.running.remove((state, arguments))
                tokens, text, reason = alone(*arguments)
                assert state.generated_tokens == tokens
                assert state.text == state.text_read == text
                assert state.finish_reason == reason
                return

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        state, arguments = self.running.pop(which % len(self.running))
        state.cancel()
        tokens, text, reason = alone(*arguments)
        assert state.finish_reason in ("cancelled", reason)
        assert tokens[: state.n_generated] == state.generated_tokens
        assert text.startswith(state.text)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5))
    def save(self, which: int) -> None:
        state, arguments = self.running[which % len(self.running)]
        if not state.began or arguments[1] is not None or state.finish_reason is not None:
            return
        options = dict(arguments[2]) | {"max_tokens": max(1, dict(arguments[2])["max_tokens"])}
        left = options["max_tokens"] - state.n_generated
        before, snapshot = state.text_read, Snapshot.take(state)
        stream = self.generator.stream([], after=snapshot, **(options | {"max_tokens": left}))
        del options["seed"]
        resumed = self.generator.stream(
            [], after=snapshot, **(options | {"max_tokens": left, "seed": None})
        )
        stream.close()
        assert before + "".join(resumed) == alone(*arguments)[1]

    def teardown(self) -> None:
        while self.running:
            self.read(0, 1)
        self.generator.close()


Streaming.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25)
TestStreaming = Streaming.TestCase


# ---- Generator ----


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Generator:
    return Generator(tiny_opt, n_ctx=200, hh=0.2, max_sequences=3, threads=1)


def test_stream_many_yields_pieces_as_generated(generator: Generator) -> None:
    prompts = ["The old man", "It was", "Once upon a time there was", "Chapter 1", "He"]
    expected = [generator.generate(prompt, max_tokens=12, seed=3).text for prompt in prompts]
    texts = [""] * len(prompts)
    order = []
    for i, piece in generator.stream_many(prompts, max_tokens=12, seed=3):
        assert piece
        texts[i] += piece
        order.append(i)
    assert texts == expected
    first = [*dict.fromkeys(order)]
    assert set(first[:3]) == {0, 1, 2}


def test_stream_many_is_fair() -> None:
    """Every endless generation yields pieces again after the others."""
    with Generator(golden("llama_gqa2_tied"), hh=8, max_sequences=3, threads=1) as endless:
        options: dict[str, Any] = {"max_tokens": 10**9, "ignore_eos": True, "seed": 1}
        pieces = endless.stream_many([[5], [6], [7]], **options)
        for _ in range(3):
            left = {0, 1, 2}
            while left:
                left.discard(next(pieces)[0])


def test_each_overrides_options(generator: Generator) -> None:
    each: list[Any] = [{"max_tokens": 2}, {}, {"stop": "man", "max_tokens": 50}]
    texts = generator.generate(["He said"] * 3, each=each, max_tokens=4, temperature=0)
    assert [text.completion_tokens for text in texts[:2]] == [2, 4]
    assert (texts[2].finish_reason, texts[2].text) == ("stop", ', "I am not a ')
    with pytest.raises(ValueError, match="each has 1 options for 2 prompts"):
        generator.generate(["a", "b"], each=[{}])
    with pytest.raises(TypeError, match="expected a list of prompts"):
        generator.generate("a", each=[{}])  # type: ignore[call-overload]


def test_endless_generation_has_n_ctx_tokens_by_default() -> None:
    with Generator(golden("llama_gqa2_tied"), hh=8, max_sequences=2, threads=1) as generator:
        assert generator.endless
        prompts = [[5] * 3, [6] * 50]
        alone = [generator.generate(prompt, seed=1, ignore_eos=True) for prompt in prompts]
        assert [text.completion_tokens for text in alone] == [N_CTX, N_CTX]
        together = generator.generate(prompts, seed=1, ignore_eos=True)
        assert [text.text for text in together] == [text.text for text in alone]
        pieces = [*generator.stream_many(prompts, seed=1, ignore_eos=True)]
        for n, text in enumerate(alone):
            assert "".join(piece for i, piece in pieces if i == n) == text.text


def test_unseeded_batch_equals_consecutive_generations(tiny_opt: Path) -> None:
    one, many = (Generator(tiny_opt, max_sequences=2, seed=9, threads=1) for _ in range(2))
    prompts = ["The", "It", "He"]
    alone = [one.generate(prompt, max_tokens=9).text for prompt in prompts]
    assert [text.text for text in many.generate(prompts, max_tokens=9)] == alone


def test_run_requests_are_pulled_on_demand(generator: Generator) -> None:
    """Requests are taken from the iterator only when a sequence is free."""
    n_requested = itertools.count()
    requests = (
        generator.request("He", max_tokens=3 + next(n_requested) % 5, ignore_eos=True)
        for _ in itertools.repeat(None)
    )
    ended = [*itertools.islice(generator.run(requests), 30)]
    assert next(n_requested) <= 30 + 3
    for i, generation in ended:
        assert generation.completion_tokens == 3 + i % 5


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        (["a", ""], ValueError, "the prompt is empty"),
        (["a", [5, 4096]], ValueError, "token 4096 is not in the vocabulary"),
        ([[5] * 201, "a"], ValueError, "the prompt has 201 tokens, n_ctx is 200"),
        (["a", 5], TypeError, "prompt must be text or token ids, got int"),
    ],
)
def test_invalid_prompts_are_rejected(
    generator: Generator, prompts: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        generator.generate(prompts)


def test_stream_many_rejects_str(generator: Generator) -> None:
    with pytest.raises(TypeError, match="expected a list of prompts"):
        generator.stream_many("The")
    assert [*generator.stream_many([])] == []
    arrays: list[Any] = [np.array([5, 6])]
    alone = generator.generate([5, 6], max_tokens=4, seed=1)
    assert [text.text for text in generator.generate(arrays, max_tokens=4, seed=1)] == [alone.text]


def test_streams_during_a_batch(generator: Generator) -> None:
    expected = generator.generate("He", temperature=0, max_tokens=5).text
    options: dict[str, Any] = {"max_tokens": 50, "ignore_eos": True, "seed": 3}
    texts = [generator.generate(prompt, **options).text for prompt in ("The", "It")]
    pieces = generator.stream_many(["The", "It"], **options)
    found = [*itertools.islice(pieces, 1)]
    assert generator.generate("He", temperature=0, max_tokens=5).text == expected
    found += pieces
    assert ["".join(piece for i, piece in found if i == n) for n in (0, 1)] == texts
    dropped = generator.stream_many(["The", "It"], max_tokens=50, ignore_eos=True)
    next(dropped)
    del dropped
    assert generator.generate("He", temperature=0, max_tokens=5).text == expected


def test_closing_engine_does_not_affect_batches_of_its_generator(generator: Generator) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "seed": 1}
    expected = [text.text for text in generator.generate([[5, 6], [7]], **options)]
    texts = ["", ""]
    pieces = generator.stream_many([[5, 6], [7]], **options)
    for n, (i, piece) in enumerate(pieces):
        texts[i] += piece
        if n == 3:
            with generator.engine() as engine:
                engine.submit([8], max_tokens=10**6)
    assert texts == expected
