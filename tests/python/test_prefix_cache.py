"""Prefix cache: bit-identical outputs from fewer prompt tokens."""

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
    "archive in files": {"hh": 40, "archive": "q8_0", "archive_pages": 2, "archive_dir": "."},
}


def open_generator(model: Path, **options: Any) -> Generator:
    return Generator(model, threads=1, n_batch=CHUNK, **options)


@pytest.fixture(params=POLICIES)
def pair(
    request: pytest.FixtureRequest,
    tiny_opt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Generator, Generator]]:
    """A generator with a prefix cache, and one without."""
    monkeypatch.chdir(tmp_path)
    options = POLICIES[request.param]
    with (
        open_generator(tiny_opt, **options) as cached,
        open_generator(tiny_opt, prefix_cache=0, **options) as plain,
    ):
        yield cached, plain


def random_tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(5, 60) for _ in range(n)]


def generate_and_kept(
    generator: Generator, prompt: list[int], seed: int = 1
) -> tuple[Generation, Any]:
    """The generation, and the kept positions and scores of each layer."""
    with generator.stream(prompt, max_tokens=6, seed=seed, ignore_eos=True) as stream:
        for _ in stream:
            pass
    kept = [generator.kept(layer, 0) for layer in range(generator.stats().n_layers)]
    return stream.generation(), [(p.tolist(), s.tolist()) for p, s in kept]


def test_conversations_equal_those_without_cache(pair: tuple[Generator, Generator]) -> None:
    """Several conversations in turns, with shared prefixes and every length relative to a chunk."""
    cached, plain = pair
    rng = random.Random(4)
    system = random_tokens(rng, 70)
    conversations = [system[: rng.randrange(30, 71)] for _ in range(4)]
    n_cached = 0
    for turn in range(24):
        i = rng.randrange(len(conversations))
        more = rng.choice([1, CHUNK - 1, CHUNK, CHUNK + 1, rng.randrange(1, 90)])
        conversations[i] = conversations[i] + random_tokens(rng, more)
        if len(conversations[i]) > 440:
            conversations[i] = conversations[i][: rng.randrange(40, 100)]
        if turn % 5 == 0:  # end exactly at a chunk boundary
            length = max(CHUNK, len(conversations[i]) // CHUNK * CHUNK)
            conversations[i] = (conversations[i] + random_tokens(rng, CHUNK))[:length]
        got, got_kept = generate_and_kept(cached, conversations[i], seed=turn)
        expected, expected_kept = generate_and_kept(plain, conversations[i], seed=turn)
        assert got.text == expected.text
        assert got_kept == expected_kept
        assert got.prompt_tokens + got.cached_tokens == len(conversations[i])
        assert cached.policy == Policy.full() or got.cached_tokens % CHUNK == 0
        assert expected.cached_tokens == 0
        n_cached += got.cached_tokens
    assert n_cached > 24 * 40


def test_next_turn_reads_only_new_tokens(tiny_opt: Path) -> None:
    """Plus less than a chunk before them."""
    with open_generator(tiny_opt, hh=60) as generator:
        prompt = random_tokens(random.Random(1), 50)
        for _ in range(6):
            n_before = len(prompt)
            result, _ = generate_and_kept(generator, prompt)
            prompt = prompt + random_tokens(random.Random(len(prompt)), 60)
            if n_before > 50:
                assert result.prompt_tokens < 60 + CHUNK


def test_third_prompt_reuses_the_prefix_shared_by_two(tiny_opt: Path) -> None:
    """The second prompt finds where the prefix ends; the third continues from there."""
    for options, expected in (
        ({"hh": 60}, [0, 0, 4 * CHUNK]),
        ({}, [0, 4 * CHUNK + 5, 4 * CHUNK + 5]),  # no eviction: the second, up to any token
    ):
        with open_generator(tiny_opt, **options) as generator:
            rng = random.Random(3)
            system = random_tokens(rng, 4 * CHUNK + 5)
            cached = [
                generate_and_kept(generator, [*system, 60 + i, *random_tokens(rng, 100)])[
                    0
                ].cached_tokens
                for i in range(3)
            ]
            assert cached == expected


def turn(generator: Generator, prompt: list[int], n: int) -> tuple[list[int], bytes, int]:
    """The history after n new tokens, the snapshot, and the number of cached tokens."""
    with generator.stream(prompt, max_tokens=n, seed=1, ignore_eos=True) as stream:
        for _ in stream:
            pass
    return stream.history, stream.save().data, stream.generation().cached_tokens


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "q8_0", "q4_0"])
def test_full_cache_is_reused_up_to_any_token(tiny_opt: Path, kv_dtype: str) -> None:
    """The next turn continues after the last output, or branches off at any earlier token."""
    rng = random.Random(11)
    options: dict[str, Any] = {"n_ctx": 160, "kv_dtype": kv_dtype}
    with (
        open_generator(tiny_opt, **options) as cached,
        open_generator(tiny_opt, prefix_cache=0, **options) as plain,
    ):
        history, *_ = turn(cached, random_tokens(rng, 45), 20)
        for cut in (len(history), 57, 41, 45):
            prompt = [*history[:cut], 61, *random_tokens(rng, 39)]
            _, got, n_cached = turn(cached, prompt, 20)
            _, expected, no_cached = turn(plain, prompt, 20)
            assert got == expected
            assert (n_cached, no_cached) == (min(cut, len(history) - 1), 0)


@pytest.mark.parametrize(
    "name", ["llama_gqa2_tied", "gptneox", "opt_odd_heads", "qwen3", "qwen3moe"]
)
def test_full_cache_is_reused_up_to_any_token_in_every_family(data: Path, name: str) -> None:
    model = data / "golden" / f"{name}.gguf"
    with open_generator(model) as cached, open_generator(model, prefix_cache=0) as plain:
        history, *_ = turn(cached, random_tokens(random.Random(13), 31), 5)
        for cut in (35, 33):
            prompt = [*history[:cut], 4, 5]
            _, got, n_cached = turn(cached, prompt, 3)
            _, expected, _ = turn(plain, prompt, 3)
            assert got == expected
            assert n_cached == cut


def test_prefixes_are_not_shared_between_policies(tiny_opt: Path) -> None:
    prompt = random_tokens(random.Random(3), 100)
    with open_generator(tiny_opt, hh=60) as generator, generator.engine() as engine:
        options: dict[str, Any] = {"max_tokens": 8, "seed": 2, "ignore_eos": True}
        for hh in (60, 30, 60, 30):
            with open_generator(tiny_opt, hh=hh, prefix_cache=0) as alone:
                expected = alone.generate(prompt, **options)
            assert engine.submit(prompt, hh=hh, **options).result().text == expected.text
        assert engine.stats().cached_tokens == 2 * len(prompt)


def test_equal_prompts_are_read_once(tiny_opt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted together, greedy and sampled; each output equals that of the prompt alone."""
    submit = Request.submit

    def submit_slowly(self: Request, *given: Any, **options: Any) -> Any:
        state = submit(self, *given, **options)
        time.sleep(0.01)  # time for a step to begin, which must not happen
        return state

    monkeypatch.setattr(Request, "submit", submit_slowly)
    prompt = random_tokens(random.Random(5), 2 * CHUNK)
    each: list[Any] = [{"seed": i, "temperature": float(i % 3)} for i in range(6)]
    with (
        open_generator(tiny_opt, hh=40, max_sequences=4) as generator,
        open_generator(tiny_opt, hh=40, prefix_cache=0) as plain,
    ):
        options: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True}
        together = generator.generate([prompt] * 6, each=each, **options)
        alone = [plain.generate(prompt, **chosen, **options) for chosen in each]
        assert [result.text for result in together] == [result.text for result in alone]
        assert sum(result.prompt_tokens for result in together) == len(prompt)
        assert generator.stats().tokens_seen == len(prompt) + 9


def test_concurrent_prompts_share_their_prefix(tiny_opt: Path) -> None:
    rng = random.Random(6)
    system = random_tokens(rng, 3 * CHUNK + 7)
    prompts = [system + random_tokens(rng, 20 + 11 * i) for i in range(5)]
    with (
        open_generator(tiny_opt, hh=50, max_sequences=5) as generator,
        open_generator(tiny_opt, hh=50, prefix_cache=0) as plain,
    ):
        options: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "seed": 3}
        together = generator.generate(prompts, **options)
        assert [result.text for result in together] == [
            plain.generate(prompt, **options).text for prompt in prompts
        ]
        assert [result.cached_tokens for result in together] == [0, *[3 * CHUNK] * 4]


def test_concurrent_prompts_share_their_prefix_after_a_cached_one(tiny_opt: Path) -> None:
    """With a full cache, chunks begin where a cached state ends, at any token."""
    rng = random.Random(7)
    system = random_tokens(rng, 3 * CHUNK + 7)
    shared = system + random_tokens(rng, 4 * CHUNK)
    prompts = [shared + random_tokens(rng, 20 + 11 * i) for i in range(3)]
    with (
        open_generator(tiny_opt, max_sequences=3) as generator,
        open_generator(tiny_opt, prefix_cache=0) as plain,
    ):
        options: dict[str, Any] = {"max_tokens": 1, "ignore_eos": True, "seed": 3}
        generator.generate(system, **options)
        together = generator.generate(prompts, **options)
        assert [result.text for result in together] == [
            plain.generate(prompt, **options).text for prompt in prompts
        ]
        first, *others = (result.cached_tokens for result in together)
        assert first <= len(system) + 1
        assert min(others) >= len(shared) - CHUNK


def test_concurrent_threads(tiny_opt: Path) -> None:
    """With memory for only one or two states."""
    rng = random.Random(7)
    system = random_tokens(rng, 80)
    prompts = [system[: 40 + 10 * i] + random_tokens(rng, 70) for i in range(4)]
    options: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "seed": 3}
    with open_generator(tiny_opt, hh=50, prefix_cache=0) as plain:
        expected = [plain.generate(prompt, **options).text for prompt in prompts]
    with open_generator(tiny_opt, hh=50, max_sequences=3, prefix_cache="700KiB") as generator:
        mismatches: list[int] = []

        def work(first: int) -> None:
            for i in range(first, first + 8):
                if generator.generate(prompts[i % 4], **options).text != expected[i % 4]:
                    mismatches.append(i)

        threads = [threading.Thread(target=work, args=[i]) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not mismatches


def test_memory_is_bounded(tiny_opt: Path) -> None:
    rng = random.Random(8)
    with (
        open_generator(tiny_opt, hh=60, prefix_cache="800KiB") as generator,
        generator.engine() as engine,
    ):
        most = 0
        for _ in range(12):
            engine.submit(random_tokens(rng, 150), max_tokens=1).result()
            most = max(most, engine.stats().prefix_bytes)
            assert engine.stats().prefix_bytes <= 800 * 1024
        assert most > 400 * 1024
    with open_generator(tiny_opt, prefix_cache=100) as generator:  # too small for any state
        prompt = random_tokens(rng, 150)
        assert [generate_and_kept(generator, prompt)[0].cached_tokens for _ in range(2)] == [0, 0]


def test_logits_do_not_use_the_prefix_cache(tiny_opt: Path) -> None:
    """They need every token of the prompt to be computed."""
    prompt = random_tokens(random.Random(9), 100)
    with open_generator(tiny_opt, hh=60) as generator:
        before = generator.logits(prompt)
        generate_and_kept(generator, prompt)
        assert (generator.logits(prompt) == before).all()


def test_prefix_ends_keeps_the_state_after_an_output(tiny_opt: Path) -> None:
    """The next turn reads only its new tokens and the last token of the output."""
    prompt, more = random_tokens(random.Random(2), 50), random_tokens(random.Random(3), 40)
    options: dict[str, Any] = {"max_tokens": 20, "seed": 3, "ignore_eos": True}
    with open_generator(tiny_opt, hh=40, prefix_ends=True) as generator:
        with generator.stream(prompt, **options) as first:
            for _ in first:
                pass
        snapshot = first.save()
        # Another generation in between.
        generator.generate(random_tokens(random.Random(4), 90), **options)
        second = generator.generate([*first.history, *more], **options)
        assert second.prompt_tokens == len(more) + 1
        assert second.cached_tokens == len(first.history) - 1
        assert second.text == generator.generate(more, after=snapshot, **options).text


def test_closed_generator(tiny_opt: Path) -> None:
    prompt = random_tokens(random.Random(2), 100)
    generator = open_generator(tiny_opt)
    streams = [generator.stream(prompt, seed=i) for i in range(3)]
    next(streams[0])
    generator.close()
    for stream in streams[1:]:
        with pytest.raises(RuntimeError, match="closed"):
            next(stream)


@pytest.mark.parametrize("value", [-1, 1.5, "much", None])
def test_invalid_sizes(tiny_opt: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="prefix_cache"):
        open_generator(tiny_opt, prefix_cache=value)


def test_embeddings_do_not_use_the_prefix_cache(pair: tuple[Generator, Generator]) -> None:
    """They need the hidden states of the whole prompt."""
    cached, plain = pair
    prompt = random_tokens(random.Random(12), 3 * CHUNK)
    cached.generate(prompt, max_tokens=1)
    for pooling in ("mean", "last"):
        for text in (prompt, [*prompt[: 2 * CHUNK], 7, 8, 9]):
            found = cached.embed([text, text], pooling=pooling)
            assert found.tolist() == plain.embed([text, text], pooling=pooling).tolist()
