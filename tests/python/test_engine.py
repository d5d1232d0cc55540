"""Texts that are continued together are those that each prompt gives alone, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from h2o_cpp.generation.continuation import Continuation
from h2o_cpp.generation.scheduler import Scheduler
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from h2o_cpp import Generator, Policy
from h2o_cpp.generation.request import make_request
from h2o_cpp.model.policy import POLICIES, named_policy
from support.random_search import examples

MODELS = ["opt_untied", "llama_gqa2_tied", "gptneox", "qwen3"]
N_CTX = 40  # as the golden models are trained
N_VOCAB = 61
GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def golden(name: str) -> Path:
    return GOLDEN / f"{name}.gguf"


def random_requests(seed: int, n: int = 9) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of 1 to 30 tokens, and how to continue them."""
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
def test_together_as_alone(model: str, name: str) -> None:
    """In chunks of 5, so that prompts are cut, evicted from, and wait for room in a batch."""
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
        assert [one.text for one in generator.generate(prompts, each=each)] == texts
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
def test_texts_that_roll(positions: Any) -> None:
    """Beyond the trained length, where what a step takes of a sequence gets smaller."""
    options: dict[str, Any] = {"policy": Policy.h2o(6, 8), "n_batch": 64, "threads": 1}
    options["positions"] = positions
    requests = [(prompt * 4, {**own, "max_tokens": 50}) for prompt, own in random_requests(3, 5)]
    with Generator(golden("llama_gqa2_tied"), **options) as alone:
        expected = [alone.generate(prompt, **own).text for prompt, own in requests]
    with Generator(golden("llama_gqa2_tied"), max_sequences=3, **options) as generator:
        prompts, each = [[*part] for part in zip(*requests, strict=True)]
        assert [one.text for one in generator.generate(prompts, each=each)] == expected


def test_texts_after_snapshots(tiny_opt: Path) -> None:
    with Generator(tiny_opt, hh=30, n_ctx=300, max_sequences=2, threads=1) as generator:
        system = generator.read("The old man looked at the sea, and after a time he said:")
        options: list[Any] = [{"seed": n} for n in range(4)]
        questions = [" Listen", " I", " My boy", " Then"]
        together = generator.generate(questions, after=system, each=options, max_tokens=20)
        alone = [
            generator.generate(question, after=system, max_tokens=20, **own)
            for question, own in zip(questions, options, strict=True)
        ]
        assert [one.text for one in together] == [one.text for one in alone]
        assert [one.prompt_tokens for one in together] == [one.prompt_tokens for one in alone]


# ---- Random arrivals, cancellations and stop rules ----

STEPPED = golden("llama_gqa2_tied")
OPTIONS: dict[str, Any] = {"n_batch": 6, "threads": 1}
SLAB = Policy.h2o(8, 8, value_norm=True)  # of which those below are parts
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
    """Tokens, text and finish reason."""
    stream = generator_of(SLAB if policy is None else policy).stream(prompt, **dict(items))
    text = "".join(stream)
    return list(stream.tokens), text, stream.finish_reason


class Serving(RuleBasedStateMachine):
    """A Scheduler of three sequences, fed, stepped and cancelled in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Generator(STEPPED, policy=SLAB, max_sequences=3, **OPTIONS)
        self.runtime = self.generator._runtime()
        self.scheduler = Scheduler(self.runtime)
        self.waiting: deque[Any] = deque()
        self.running: dict[Continuation, Any] = {}

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
        self.waiting.append((prompt, policy, tuple(options.items())))
        self.begin()

    @precondition(lambda self: self.running)
    @rule(n=st.integers(1, 12))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.step()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2))
    def cancel(self, which: int) -> None:
        continuation = [*self.running][which % len(self.running)]
        self.scheduler.cancel(continuation)
        tokens, text, _ = alone(*self.running.pop(continuation))
        assert continuation.finish_reason == "cancelled"
        assert tokens[: len(continuation.tokens)] == list(continuation.tokens)
        assert text.startswith(continuation.said.getvalue())
        self.begin()

    @invariant()
    def every_sequence_is_free_or_taken(self) -> None:
        assert self.scheduler.n_active == len(self.running)
        assert self.scheduler.n_free + self.scheduler.n_active == 3
        assert not self.waiting or not self.scheduler.n_free

    def begin(self) -> None:
        while self.waiting and self.scheduler.n_free:
            what = self.waiting.popleft()
            prompt, policy, items = what
            seeds = random.Random(0)
            request = make_request(
                self.runtime, seeds, prompt, after=None, policy=policy, record=None, **dict(items)
            )
            self.running[self.scheduler.start(request)] = what

    def step(self) -> None:
        for continuation, _ in self.scheduler.step():
            if continuation.finish_reason is not None:
                tokens, text, reason = alone(*self.running.pop(continuation))
                assert list(continuation.tokens) == tokens
                assert continuation.said.getvalue() == text
                assert continuation.finish_reason == reason
        self.begin()

    def teardown(self) -> None:
        while self.running:
            self.step()
        self.generator.close()


Serving.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25)
TestServing = Serving.TestCase


# ---- The scheduler's promises ----


def requests_of(generator: Generator, prompts: list[list[int]], **options: Any) -> list[Any]:
    return [generator.request(prompt, temperature=0, **options) for prompt in prompts]


def test_nobody_waits_for_a_long_prompt() -> None:
    """While one is read in three chunks, the other gets a token in each step."""
    with Generator(golden("gptneox"), n_batch=10, max_sequences=2, threads=1) as generator:
        short, long = requests_of(generator, [[5], [*range(3, 33)]], ignore_eos=True)
        scheduler = Scheduler(generator._runtime())
        first = scheduler.start(short)
        scheduler.step()
        second = scheduler.start(long)
        lengths = [(len(first.tokens), len(second.tokens)) for _ in range(4) if [scheduler.step()]]
        assert lengths == [(2, 0), (3, 0), (4, 1), (5, 2)]


def test_prompts_are_read_in_order_of_arrival() -> None:
    """Chunks of 10 in batches of 12: the second prompt's waits while the first one's are read, and
    a small one goes beside it."""
    with Generator(golden("gptneox"), n_batch=10, max_sequences=3, threads=1) as generator:
        runtime = generator._runtime()
        assert runtime.session.n_batch == 12
        scheduler = Scheduler(runtime)
        prompts = [[*range(3, 23)], [*range(3, 23)], [7, 8]]
        for request in requests_of(generator, prompts, ignore_eos=True):
            scheduler.start(request)
        seen = []
        for _ in range(4):
            scheduler.step()
            seen.append([runtime.session.tokens_seen(s) for s in range(3)])
        assert seen == [[10, 0, 2], [20, 0, 3], [21, 10, 4], [22, 20, 5]]


def test_a_bad_token_is_an_error_of_its_request_alone() -> None:
    """One that was good when it was checked, and is not when it is read."""
    with Generator(golden("qwen3"), max_sequences=3, threads=1) as generator:
        prompts = [[5, 6], [7, 8], [9]]
        expected = []
        for prompt in prompts:
            stream = generator.stream(prompt, temperature=0, max_tokens=5)
            for _ in stream:
                pass
            expected.append(list(stream.tokens))
        scheduler = Scheduler(generator._runtime())
        good, bad, other = (
            scheduler.start(request) for request in requests_of(generator, prompts, max_tokens=5)
        )
        scheduler._rows[bad].unread[0] = N_VOCAB
        while scheduler.n_active:
            scheduler.step()
        assert isinstance(bad.error, ValueError)
        assert (bad.finish_reason, list(bad.tokens)) == ("cancelled", [])
        assert [list(good.tokens), list(other.tokens)] == [expected[0], expected[2]]
        assert scheduler.n_free == 3


# ---- Generator ----


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Generator:
    return Generator(tiny_opt, n_ctx=200, hh=0.2, max_sequences=3, threads=1)


def test_pieces_come_as_they_are_generated(generator: Generator) -> None:
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
    assert order != sorted(order)


def test_options_of_each(generator: Generator) -> None:
    each: list[Any] = [{"max_tokens": 2}, {}, {"stop": "man", "max_tokens": 50}]
    texts = generator.generate(["He said"] * 3, each=each, max_tokens=4, temperature=0)
    assert [text.completion_tokens for text in texts[:2]] == [2, 4]
    assert (texts[2].finish_reason, texts[2].text) == ("stop", ', "I am not a ')
    with pytest.raises(ValueError, match="each has 1 options for 2 prompts"):
        generator.generate(["a", "b"], each=[{}])
    with pytest.raises(TypeError, match="must be a list of prompts"):
        generator.generate("a", each=[{}])  # type: ignore[call-overload]


def test_texts_that_could_go_on_for_ever_end_at_the_context() -> None:
    with Generator(golden("llama_gqa2_tied"), hh=8, max_sequences=2, threads=1) as generator:
        assert generator.endless
        prompts = [[5] * 3, [6] * 50]
        alone = [generator.generate(prompt, seed=1, ignore_eos=True) for prompt in prompts]
        assert [text.completion_tokens for text in alone] == [N_CTX - 3 + 1, N_CTX]
        together = generator.generate(prompts, seed=1, ignore_eos=True)
        assert [text.text for text in together] == [text.text for text in alone]
        pieces = [*generator.stream_many(prompts, seed=1, ignore_eos=True)]
        for n, text in enumerate(alone):
            assert "".join(piece for i, piece in pieces if i == n) == text.text


def test_without_a_seed_texts_are_those_of_a_series(tiny_opt: Path) -> None:
    one, many = (Generator(tiny_opt, max_sequences=2, seed=9, threads=1) for _ in range(2))
    prompts = ["The", "It", "He"]
    alone = [one.generate(prompt, max_tokens=9).text for prompt in prompts]
    assert [text.text for text in many.generate(prompts, max_tokens=9)] == alone


def test_any_number_of_requests(generator: Generator) -> None:
    """They are asked for one by one, when there is a sequence for them."""
    asked = itertools.count()
    requests = (
        generator.request("He", max_tokens=3 + next(asked) % 5, ignore_eos=True)
        for _ in itertools.repeat(None)
    )
    ended = [*itertools.islice(generator.run(requests), 30)]
    assert next(asked) <= 30 + 3
    for i, generation in ended:
        assert generation.completion_tokens == 3 + i % 5


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        (["a", ""], ValueError, "the prompt is empty"),
        (["a", [5, 4096]], ValueError, "token 4096 is not in the vocabulary"),
        ([[5] * 201, "a"], ValueError, "the prompt has 201 tokens, n_ctx is 200"),
        (["a", 5], TypeError, "prompt must be text or token ids, got int"),
        ([], ValueError, "the prompt is empty"),
    ],
)
def test_prompts_that_make_no_sense(
    generator: Generator, prompts: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        generator.generate(prompts)


def test_a_text_is_no_list_of_prompts(generator: Generator) -> None:
    with pytest.raises(TypeError, match="must be a list of prompts"):
        generator.stream_many("The")
    assert [*generator.stream_many([])] == []
    arrays: list[Any] = [np.array([5, 6])]
    alone = generator.generate([5, 6], max_tokens=4, seed=1)
    assert [text.text for text in generator.generate(arrays, max_tokens=4, seed=1)] == [alone.text]


def test_another_stream_of_the_thread_ends_a_batch(generator: Generator) -> None:
    expected = generator.generate("He", temperature=0, max_tokens=5).text
    pieces = generator.stream_many(["The", "It"], max_tokens=50, ignore_eos=True)
    next(pieces)
    assert generator.generate("He", temperature=0, max_tokens=5).text == expected
    with pytest.raises(RuntimeError, match="this batch was ended"):
        list(pieces)
    dropped = generator.stream_many(["The", "It"], max_tokens=50, ignore_eos=True)
    next(dropped)
    del dropped
    assert generator.generate("He", temperature=0, max_tokens=5).text == expected
