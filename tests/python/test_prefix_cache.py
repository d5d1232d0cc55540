"""The prefix cache: bit-identical outputs from fewer tokens read."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator, Policy
from h2o_cpp.generation.request import Request
from h2o_cpp.generation.stream import Generation

CHUNK = 32  # n_batch
POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "h2o": {"hh": 40},
    "less than a chunk": {"hh": 20},
    "window": {"hh": 48, "policy": "window"},
    "wide window": {"hh": 100, "policy": "window"},
    "q8_0": {"hh": 60, "kv_dtype": "q8_0"},
    "archive": {"hh": 40, "archive": "q8_0", "archive_pages": 2},
}


def opened(model: Path, **options: Any) -> Generator:
    return Generator(model, threads=1, n_batch=CHUNK, **options)


@pytest.fixture(params=POLICIES)
def pair(request: pytest.FixtureRequest, tiny_opt: Path) -> Iterator[tuple[Generator, Generator]]:
    """With a prefix cache, and without."""
    options = POLICIES[request.param]
    with (
        opened(tiny_opt, **options) as cached,
        opened(tiny_opt, prefix_cache=0, **options) as plain,
    ):
        yield cached, plain


def tokens_of(numbers: random.Random, n: int) -> list[int]:
    return [numbers.randrange(5, 60) for _ in range(n)]


def continued(generator: Generator, prompt: list[int], seed: int = 1) -> tuple[Generation, Any]:
    """An output, and all that the model says after its last token."""
    with generator.stream(prompt, max_tokens=6, seed=seed, ignore_eos=True) as stream:
        for _ in stream:
            pass
    kept = [generator.kept(layer, 0) for layer in range(generator.stats().n_layers)]
    return stream.generation(), [(p.tolist(), s.tolist()) for p, s in kept]


def test_random_conversations(pair: tuple[Generator, Generator]) -> None:
    """Turn by turn, several at once, with beginnings in common and at every length of a chunk."""
    cached, plain = pair
    numbers = random.Random(4)
    system = tokens_of(numbers, 70)
    conversations = [system[: numbers.randrange(30, 71)] for _ in range(4)]
    n_cached = 0
    for turn in range(24):
        i = numbers.randrange(len(conversations))
        more = numbers.choice([1, CHUNK - 1, CHUNK, CHUNK + 1, numbers.randrange(1, 90)])
        conversations[i] = conversations[i] + tokens_of(numbers, more)
        if len(conversations[i]) > 440:
            conversations[i] = conversations[i][: numbers.randrange(40, 100)]
        if turn % 5 == 0:  # on an exact end of a chunk
            length = max(CHUNK, len(conversations[i]) // CHUNK * CHUNK)
            conversations[i] = (conversations[i] + tokens_of(numbers, CHUNK))[:length]
        got, got_kept = continued(cached, conversations[i], seed=turn)
        expected, expected_kept = continued(plain, conversations[i], seed=turn)
        assert got.text == expected.text
        assert got_kept == expected_kept
        assert got.prompt_tokens + got.cached_tokens == len(conversations[i])
        assert cached.policy == Policy.full() or got.cached_tokens % CHUNK == 0
        assert expected.cached_tokens == 0
        n_cached += got.cached_tokens
    assert n_cached > 24 * 40


def test_a_turn_reads_its_new_tokens(tiny_opt: Path) -> None:
    """And less than a chunk before them."""
    with opened(tiny_opt, hh=60) as generator:
        prompt = tokens_of(random.Random(1), 50)
        for _ in range(6):
            n_before = len(prompt)
            result, _ = continued(generator, prompt)
            prompt = prompt + tokens_of(random.Random(len(prompt)), 60)
            if n_before > 50:
                assert result.prompt_tokens < 60 + CHUNK


def test_prompts_part_where_others_have(tiny_opt: Path) -> None:
    """The second to begin alike finds out where they part, and the third goes on from there."""
    for options, expected in (
        ({"hh": 60}, [0, 0, 4 * CHUNK]),
        ({}, [0, 4 * CHUNK + 5, 4 * CHUNK + 5]),  # where nothing is evicted, at once and exactly
    ):
        with opened(tiny_opt, **options) as generator:
            numbers = random.Random(3)
            system = tokens_of(numbers, 4 * CHUNK + 5)
            cached = [
                continued(generator, [*system, 60 + i, *tokens_of(numbers, 100)])[0].cached_tokens
                for i in range(3)
            ]
            assert cached == expected


def turn(generator: Generator, prompt: list[int], n: int) -> tuple[list[int], bytes, int]:
    """The text after n more tokens, its state, and how many tokens were not read."""
    with generator.stream(prompt, max_tokens=n, seed=1, ignore_eos=True) as stream:
        for _ in stream:
            pass
    return stream.history, stream.save().data, stream.generation().cached_tokens


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "q8_0", "q4_0"])
def test_a_full_cache_depends_on_its_tokens_alone(tiny_opt: Path, kv_dtype: str) -> None:
    """So a conversation goes on where its last output ended, and may part from it anywhere."""
    numbers = random.Random(11)
    options: dict[str, Any] = {"n_ctx": 160, "kv_dtype": kv_dtype}
    with (
        opened(tiny_opt, **options) as cached,
        opened(tiny_opt, prefix_cache=0, **options) as plain,
    ):
        history, *_ = turn(cached, tokens_of(numbers, 45), 20)
        for cut in (len(history), 57, 41, 45):
            prompt = [*history[:cut], 61, *tokens_of(numbers, 39)]
            _, got, n_cached = turn(cached, prompt, 20)
            _, expected, none = turn(plain, prompt, 20)
            assert got == expected
            assert (n_cached, none) == (min(cut, len(history) - 1), 0)


@pytest.mark.parametrize(
    "name", ["llama_gqa2_tied", "gptneox", "opt_odd_heads", "qwen3", "qwen3moe"]
)
def test_so_does_that_of_every_family(data: Path, name: str) -> None:
    model = data / "golden" / f"{name}.gguf"
    with opened(model) as cached, opened(model, prefix_cache=0) as plain:
        history, *_ = turn(cached, tokens_of(random.Random(13), 31), 5)
        for cut in (35, 33):
            prompt = [*history[:cut], 4, 5]
            _, got, n_cached = turn(cached, prompt, 3)
            _, expected, _ = turn(plain, prompt, 3)
            assert got == expected
            assert n_cached == cut


def test_other_policies_have_other_states(tiny_opt: Path) -> None:
    prompt = tokens_of(random.Random(3), 100)
    with opened(tiny_opt, hh=60) as generator, generator.engine() as engine:
        options: dict[str, Any] = {"max_tokens": 8, "seed": 2, "ignore_eos": True}
        for hh in (60, 30, 60, 30):
            with opened(tiny_opt, hh=hh, prefix_cache=0) as alone:
                expected = alone.generate(prompt, **options)
            assert engine.submit(prompt, hh=hh, **options).result().text == expected.text
        assert engine.stats().cached_tokens == 2 * 3 * CHUNK


def test_choices_of_one_prompt_read_it_once(
    tiny_opt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, to its end, greedy and sampled; and each as it is alone."""
    submit = Request.submit

    def submit_slowly(self: Request, *given: Any, **options: Any) -> Any:
        state = submit(self, *given, **options)
        time.sleep(0.01)  # a step could begin meanwhile, and must not
        return state

    monkeypatch.setattr(Request, "submit", submit_slowly)
    prompt = tokens_of(random.Random(5), 2 * CHUNK)
    each: list[Any] = [{"seed": i, "temperature": float(i % 3)} for i in range(6)]
    with (
        opened(tiny_opt, hh=40, max_sequences=4) as generator,
        opened(tiny_opt, hh=40, prefix_cache=0) as plain,
    ):
        options: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True}
        together = generator.generate([prompt] * 6, each=each, **options)
        alone = [plain.generate(prompt, **own, **options) for own in each]
        assert [one.text for one in together] == [one.text for one in alone]
        assert sum(one.prompt_tokens for one in together) == len(prompt)
        assert generator.stats().tokens_seen == len(prompt) + 9


def test_prompts_that_begin_alike_at_once(tiny_opt: Path) -> None:
    numbers = random.Random(6)
    system = tokens_of(numbers, 3 * CHUNK + 7)
    prompts = [system + tokens_of(numbers, 20 + 11 * i) for i in range(5)]
    with (
        opened(tiny_opt, hh=50, max_sequences=5) as generator,
        opened(tiny_opt, hh=50, prefix_cache=0) as plain,
    ):
        options: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "seed": 3}
        together = generator.generate(prompts, **options)
        assert [one.text for one in together] == [
            plain.generate(prompt, **options).text for prompt in prompts
        ]
        assert [one.cached_tokens for one in together] == [0, *[3 * CHUNK] * 4]


def test_threads_that_race(tiny_opt: Path) -> None:
    """With a cache that has room for a state or two."""
    numbers = random.Random(7)
    system = tokens_of(numbers, 80)
    prompts = [system[: 40 + 10 * i] + tokens_of(numbers, 70) for i in range(4)]
    options: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "seed": 3}
    with opened(tiny_opt, hh=50, prefix_cache=0) as plain:
        expected = [plain.generate(prompt, **options).text for prompt in prompts]
    with opened(tiny_opt, hh=50, max_sequences=3, prefix_cache="700KiB") as generator:
        wrong: list[int] = []

        def work(first: int) -> None:
            for i in range(first, first + 8):
                if generator.generate(prompts[i % 4], **options).text != expected[i % 4]:
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=[i]) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_the_memory_is_bounded(tiny_opt: Path) -> None:
    numbers = random.Random(8)
    with (
        opened(tiny_opt, hh=60, prefix_cache="800KiB") as generator,
        generator.engine() as engine,
    ):
        most = 0
        for _ in range(12):
            engine.submit(tokens_of(numbers, 150), max_tokens=1).result()
            most = max(most, engine.stats().prefix_bytes)
            assert engine.stats().prefix_bytes <= 800 * 1024
        assert most > 400 * 1024
    with opened(tiny_opt, prefix_cache=100) as generator:  # no state is that small
        prompt = tokens_of(numbers, 150)
        assert [continued(generator, prompt)[0].cached_tokens for _ in range(2)] == [0, 0]


def test_those_who_look_at_every_token_of_a_prompt(tiny_opt: Path) -> None:
    """Logits of a prompt need it to be read."""
    prompt = tokens_of(random.Random(9), 100)
    with opened(tiny_opt, hh=60) as generator:
        before = generator.logits(prompt)
        continued(generator, prompt)
        assert (generator.logits(prompt) == before).all()


def test_ends_go_on_as_a_chat_does(tiny_opt: Path) -> None:
    """In the state that the output left: besides what is new, its last token is read."""
    prompt, more = tokens_of(random.Random(2), 50), tokens_of(random.Random(3), 40)
    options: dict[str, Any] = {"max_tokens": 20, "seed": 3, "ignore_eos": True}
    with opened(tiny_opt, hh=40, prefix_ends=True) as generator:
        with generator.stream(prompt, **options) as first:
            for _ in first:
                pass
        snapshot = first.save()
        # Something else is computed meanwhile.
        generator.generate(tokens_of(random.Random(4), 90), **options)
        second = generator.generate([*first.history, *more], **options)
        assert second.prompt_tokens == len(more) + 1
        assert second.cached_tokens == len(first.history) - 1
        assert second.text == generator.generate(more, after=snapshot, **options).text


def test_a_closed_generator(tiny_opt: Path) -> None:
    prompt = tokens_of(random.Random(2), 100)
    generator = opened(tiny_opt)
    streams = [generator.stream(prompt, seed=i) for i in range(3)]
    next(streams[0])
    generator.close()
    for stream in streams[1:]:
        with pytest.raises(RuntimeError, match="closed"):
            next(stream)


@pytest.mark.parametrize("value", [-1, 1.5, "much", None])
def test_sizes_that_are_none(tiny_opt: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="prefix_cache"):
        opened(tiny_opt, prefix_cache=value)


def test_embeddings_are_of_every_token(pair: tuple[Generator, Generator]) -> None:
    """They need the hidden states of the whole prompt, so nothing of it is left out."""
    cached, plain = pair
    prompt = tokens_of(random.Random(12), 3 * CHUNK)
    cached.generate(prompt, max_tokens=1)
    for pooling in ("mean", "last"):
        for text in (prompt, [*prompt[: 2 * CHUNK], 7, 8, 9]):
            found = cached.embed([text, text], pooling=pooling)
            assert found.tolist() == plain.embed([text, text], pooling=pooling).tolist()
