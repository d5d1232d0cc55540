"""The prefix cache on disk: bit-identical outputs, also after restarts."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from h2o_cpp.generation.stream import Generation

CHUNK = 32  # n_batch
POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "h2o": {"hh": 40},
    "window": {"hh": 48, "policy": "window"},
    "q8_0": {"hh": 60, "kv_dtype": "q8_0"},
}


def opened(model: Path, folder: Path | None, **options: Any) -> Generator:
    """Without a folder, without prefixes."""
    where = {"prefix_cache": 0} if folder is None else {"prefix_cache_disk": folder}
    return Generator(model, **{"threads": 1, "n_batch": CHUNK, **where, **options})


def tokens_of(numbers: random.Random, n: int) -> list[int]:
    return [numbers.randrange(5, 60) for _ in range(n)]


def continued(generator: Generator, prompt: list[int], seed: int = 1) -> tuple[Generation, Any]:
    """An output, and what the cache keeps after it."""
    with generator.stream(prompt, max_tokens=4, seed=seed, ignore_eos=True) as stream:
        for _ in stream:
            pass
    kept = [generator.kept(layer, 0) for layer in range(generator.stats().n_layers)]
    return stream.generation(), [(p.tolist(), s.tolist()) for p, s in kept]


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.fixture
def prompt() -> list[int]:
    return tokens_of(random.Random(1), 3 * CHUNK + 5)


@pytest.fixture
def saved(tiny_opt: Path, tmp_path: Path, prompt: list[int]) -> Path:
    """A directory with one state, of three chunks of the prompt."""
    with opened(tiny_opt, tmp_path, hh=40) as generator:
        continued(generator, prompt)
    assert len(files(tmp_path)) == 1
    return tmp_path


@pytest.fixture(scope="module")
def expected(tiny_opt: Path) -> Iterator[Any]:
    with opened(tiny_opt, None, hh=40) as plain:
        yield continued(plain, tokens_of(random.Random(1), 3 * CHUNK + 5))


@pytest.mark.parametrize("memory", [0, 300_000], ids=["disk alone", "memory too"])
@pytest.mark.parametrize("policy", POLICIES)
def test_random_conversations(tiny_opt: Path, tmp_path: Path, policy: str, memory: int) -> None:
    """Turn by turn, with beginnings in common; restarted in between."""
    options = POLICIES[policy]
    numbers = random.Random(4)
    system = tokens_of(numbers, 70)
    conversations = [system[: numbers.randrange(30, 71)] for _ in range(3)]
    n_cached = 0
    with opened(tiny_opt, None, **options) as plain:
        for _ in range(3):
            with opened(tiny_opt, tmp_path, prefix_cache=memory, **options) as cached:
                for turn in range(5):
                    i = numbers.randrange(len(conversations))
                    conversations[i] += tokens_of(numbers, numbers.randrange(1, 60))
                    got, got_kept = continued(cached, conversations[i], seed=turn)
                    whole, whole_kept = continued(plain, conversations[i], seed=turn)
                    assert (got.text, got_kept) == (whole.text, whole_kept)
                    n_cached += got.cached_tokens
    assert n_cached > 10 * CHUNK


def test_found_after_a_restart(
    tiny_opt: Path, saved: Path, prompt: list[int], expected: Any
) -> None:
    with opened(tiny_opt, saved, hh=40) as generator:
        result, kept = continued(generator, prompt)
    assert result.cached_tokens == 3 * CHUNK
    assert (result.text, kept) == (expected[0].text, expected[1])


def test_other_threads_find_it(
    tiny_opt: Path, saved: Path, prompt: list[int], expected: Any
) -> None:
    """Bits do not depend on how many there are."""
    with opened(tiny_opt, saved, hh=40, threads=2) as generator:
        result, kept = continued(generator, prompt)
    assert result.cached_tokens == 3 * CHUNK
    assert (result.text, kept) == (expected[0].text, expected[1])


@pytest.mark.parametrize(
    "options",
    [
        {"hh": 48},
        {"hh": 40, "n_ctx": 256},
        {"hh": 40, "n_batch": 16},
        {"hh": 40, "kv_dtype": "f32"},
    ],
    ids=str,
)
def test_other_options_have_other_states(
    tiny_opt: Path, saved: Path, prompt: list[int], options: dict[str, Any]
) -> None:
    with opened(tiny_opt, saved, **options) as generator:
        assert continued(generator, prompt)[0].cached_tokens == 0


def test_another_model(llama: Path, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(llama, saved, hh=20) as generator:
        prompt = [3] * (CHUNK + 1)
        assert continued(generator, prompt)[0].cached_tokens == 0
    assert len(files(saved)) == 2
    assert not caplog.records


def damaged(data: bytes) -> Iterator[bytes]:
    """Cut and changed in every part of a file."""
    numbers = random.Random(7)
    places = [*range(0, 120, 7), len(data) - 1, *(numbers.randrange(len(data)) for _ in range(20))]
    for at in places:
        yield data[:at]
        yield data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def test_files_that_are_damaged(
    tiny_opt: Path, saved: Path, prompt: list[int], expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Are ignored, with one line; and then replaced."""
    [path] = files(saved)
    whole = path.read_bytes()
    for data in damaged(whole):
        path.write_bytes(data)
        caplog.clear()
        with opened(tiny_opt, saved, hh=40) as generator:
            result, kept = continued(generator, prompt)
        assert (result.text, kept) == (expected[0].text, expected[1])
        # Of another scope where that is what has changed, which is no damage.
        if data[12:20] == whole[12:20]:
            assert [record.levelno for record in caplog.records] == [logging.WARNING]
            assert path.name in caplog.text
        assert result.cached_tokens == 0
        assert path.read_bytes() == whole


def test_a_state_of_another_text(
    tiny_opt: Path, saved: Path, prompt: list[int], expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Both halves of the file are whole, and do not belong together."""
    [path] = files(saved)
    other = [*prompt]
    other[3] += 1
    with opened(tiny_opt, saved, hh=40) as generator:
        continued(generator, other)
    [second] = {*files(saved)} - {path}
    first_bytes, second_bytes = path.read_bytes(), second.read_bytes()
    at = first_bytes.index(b"h2o snap")
    path.write_bytes(first_bytes[:at] + second_bytes[at:])
    with opened(tiny_opt, saved, hh=40) as generator:
        result, kept = continued(generator, prompt)
    assert (result.text, kept) == (expected[0].text, expected[1])
    assert "its state has other tokens" in caplog.text


def test_those_not_used_for_longest_go(tiny_opt: Path, saved: Path, prompt: list[int]) -> None:
    [first] = files(saved)
    size = first.stat().st_size
    foreign = [saved / "notes.txt", saved / f"{'0' * 16}-{'0' * 16}.prefix"]
    for one in foreign:
        one.write_text("not ours")
    os.utime(first, ns=(1, 1))
    limit = 3 * size + size // 2
    with opened(tiny_opt, saved, hh=40, prefix_cache_disk_bytes=limit) as generator:
        for seed in range(2, 4):
            continued(generator, tokens_of(random.Random(seed), 3 * CHUNK + 5))
        continued(generator, prompt)  # used now
    assert len(files(saved)) == 3 + len(foreign)
    with opened(tiny_opt, saved, hh=40, prefix_cache_disk_bytes=limit) as generator:
        continued(generator, tokens_of(random.Random(9), 3 * CHUNK + 5))
    left = {*files(saved)}
    assert first in left
    assert {*foreign} <= left
    assert sum(path.stat().st_size for path in left - {*foreign}) <= limit


def test_a_state_larger_than_the_limit(tiny_opt: Path, tmp_path: Path, prompt: list[int]) -> None:
    with opened(tiny_opt, tmp_path, hh=40, prefix_cache_disk_bytes=100) as generator:
        continued(generator, prompt)
    assert files(tmp_path) == []


def test_a_directory_that_goes_away(
    tiny_opt: Path, tmp_path: Path, prompt: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Costs the states, and no output."""
    folder = tmp_path / "a" / "b"
    with opened(tiny_opt, folder, hh=40) as generator:
        text = continued(generator, prompt)[0].text
        folder.rmdir()
    assert text
    assert "cannot be written" in caplog.text


def test_a_directory_that_cannot_be(tiny_opt: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OSError, match="file"):
        opened(tiny_opt, file)


def test_several_at_once(tiny_opt: Path, tmp_path: Path, prompt: list[int]) -> None:
    """Two that are open share a directory."""
    with opened(tiny_opt, tmp_path, hh=40) as one, opened(tiny_opt, tmp_path, hh=40) as two:
        assert continued(one, prompt)[0].text == continued(two, prompt)[0].text
    assert len(files(tmp_path)) == 1
