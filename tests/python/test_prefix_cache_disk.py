"""Prefix cache on disk: bit-identical outputs, also after a restart."""

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


def open_generator(model: Path, folder: Path | None, **options: Any) -> Generator:
    """With prefixes cached in the folder; None disables the prefix cache."""
    cache_options = {"prefix_cache": 0} if folder is None else {"prefix_cache_disk": folder}
    return Generator(model, **{"threads": 1, "n_batch": CHUNK, **cache_options, **options})


def random_tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(5, 60) for _ in range(n)]


def generate_kept(generator: Generator, prompt: list[int], seed: int = 1) -> tuple[Generation, Any]:
    """The generation, and the kept positions and scores of each layer."""
    with generator.stream(prompt, max_tokens=4, seed=seed, ignore_eos=True) as stream:
        for _ in stream:
            pass
    kept = [generator.kept(layer, 0) for layer in range(generator.stats().n_layers)]
    return stream.generation(), [(p.tolist(), s.tolist()) for p, s in kept]


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.fixture
def prompt() -> list[int]:
    return random_tokens(random.Random(1), 3 * CHUNK + 5)


@pytest.fixture
def saved(tiny_opt: Path, tmp_path: Path, prompt: list[int]) -> Path:
    """A directory with one state: three chunks of the prompt."""
    with open_generator(tiny_opt, tmp_path, hh=40) as generator:
        generator.read(prompt)
    assert len(files(tmp_path)) == 1
    return tmp_path


@pytest.fixture(scope="module")
def expected(tiny_opt: Path) -> Iterator[Any]:
    with open_generator(tiny_opt, None, hh=40) as plain:
        yield generate_kept(plain, random_tokens(random.Random(1), 3 * CHUNK + 5))


@pytest.mark.parametrize("memory", [0, 300_000], ids=["disk alone", "memory too"])
@pytest.mark.parametrize("policy", POLICIES)
def test_conversations_equal_uncached(
    tiny_opt: Path, tmp_path: Path, policy: str, memory: int
) -> None:
    """Several conversations in turns, with shared prefixes and restarts in between."""
    options = POLICIES[policy]
    rng = random.Random(4)
    system = random_tokens(rng, 70)
    conversations = [system[: rng.randrange(30, 71)] for _ in range(3)]
    n_cached = 0
    with open_generator(tiny_opt, None, **options) as plain:
        for _ in range(3):
            with open_generator(tiny_opt, tmp_path, prefix_cache=memory, **options) as cached:
                for turn in range(5):
                    i = rng.randrange(len(conversations))
                    conversations[i] += random_tokens(rng, rng.randrange(1, 60))
                    got, got_kept = generate_kept(cached, conversations[i], seed=turn)
                    whole, whole_kept = generate_kept(plain, conversations[i], seed=turn)
                    assert (got.text, got_kept) == (whole.text, whole_kept)
                    n_cached += got.cached_tokens
    assert n_cached > 10 * CHUNK


def test_state_is_found_after_a_restart(
    tiny_opt: Path, saved: Path, prompt: list[int], expected: Any
) -> None:
    with open_generator(tiny_opt, saved, hh=40) as generator:
        result, kept = generate_kept(generator, prompt)
    assert result.cached_tokens == 3 * CHUNK
    assert (result.text, kept) == (expected[0].text, expected[1])


def test_state_is_found_with_another_number_of_threads(
    tiny_opt: Path, saved: Path, prompt: list[int], expected: Any
) -> None:
    """Outputs are bit-identical for every number of threads."""
    with open_generator(tiny_opt, saved, hh=40, threads=2) as generator:
        result, kept = generate_kept(generator, prompt)
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
def test_states_are_not_shared_between_options(
    tiny_opt: Path, saved: Path, prompt: list[int], options: dict[str, Any]
) -> None:
    with open_generator(tiny_opt, saved, **options) as generator:
        assert generate_kept(generator, prompt)[0].cached_tokens == 0


def test_states_are_not_shared_between_models(
    llama: Path, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_generator(llama, saved, hh=20) as generator:
        prompt = [3] * (CHUNK + 1)
        assert generate_kept(generator, prompt)[0].cached_tokens == 0
    assert len(files(saved)) == 4  # a chunk, the prompt and the output
    assert not caplog.records


def damaged(data: bytes) -> Iterator[bytes]:
    """The data truncated, and with one bit flipped, in every part of the file."""
    rng = random.Random(7)
    offsets = [*range(0, 120, 7), len(data) - 1, *(rng.randrange(len(data)) for _ in range(20))]
    for offset in offsets:
        yield data[:offset]
        yield data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1 :]


def test_damaged_files_are_replaced(
    tiny_opt: Path, saved: Path, prompt: list[int], expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """They are ignored with a warning, then written again."""
    [path] = files(saved)
    whole = path.read_bytes()
    for data in damaged(whole):
        path.write_bytes(data)
        caplog.clear()
        with open_generator(tiny_opt, saved, hh=40) as generator:
            result, kept = generate_kept(generator, prompt)
        assert (result.text, kept) == (expected[0].text, expected[1])
        # A change of the scope makes it a file of other options, which is not damage.
        if data[12:20] == whole[12:20]:
            assert [record.levelno for record in caplog.records] == [logging.WARNING]
            assert path.name in caplog.text
        assert result.cached_tokens == 0
        assert path.read_bytes() == whole
        for ended in {*files(saved)} - {path}:  # the prompt and the output
            ended.unlink()


def test_state_of_another_prompt_is_rejected(
    tiny_opt: Path, saved: Path, prompt: list[int], expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Both halves of the file are valid but come from different files."""
    [path] = files(saved)
    other = [*prompt]
    other[3] += 1
    with open_generator(tiny_opt, saved, hh=40) as generator:
        generator.read(other)
    [second] = {*files(saved)} - {path}
    first_bytes, second_bytes = path.read_bytes(), second.read_bytes()
    offset = first_bytes.index(b"h2o snap")
    path.write_bytes(first_bytes[:offset] + second_bytes[offset:])
    with open_generator(tiny_opt, saved, hh=40) as generator:
        result, kept = generate_kept(generator, prompt)
    assert (result.text, kept) == (expected[0].text, expected[1])
    assert "its state has other tokens" in caplog.text


def test_least_recently_used_states_are_deleted(
    tiny_opt: Path, saved: Path, prompt: list[int]
) -> None:
    [first] = files(saved)
    size = first.stat().st_size
    foreign = [saved / "notes.txt", saved / f"{'0' * 16}-{'0' * 16}.prefix"]
    for file in foreign:
        file.write_text("not ours")
    os.utime(first, ns=(1, 1))
    limit = 3 * size + size // 2
    with open_generator(tiny_opt, saved, hh=40, prefix_cache_disk_bytes=limit) as generator:
        for seed in range(2, 4):
            generator.read(random_tokens(random.Random(seed), 3 * CHUNK + 5))
        generator.read(prompt)  # used now
    assert len(files(saved)) == 3 + len(foreign)
    with open_generator(tiny_opt, saved, hh=40, prefix_cache_disk_bytes=limit) as generator:
        generator.read(random_tokens(random.Random(9), 3 * CHUNK + 5))
    remaining = {*files(saved)}
    assert first in remaining
    assert {*foreign} <= remaining
    assert sum(path.stat().st_size for path in remaining - {*foreign}) <= limit


def test_state_larger_than_the_limit_is_not_saved(
    tiny_opt: Path, tmp_path: Path, prompt: list[int]
) -> None:
    with open_generator(tiny_opt, tmp_path, hh=40, prefix_cache_disk_bytes=100) as generator:
        generate_kept(generator, prompt)
    assert files(tmp_path) == []


def test_deleted_directory_does_not_affect_outputs(
    tiny_opt: Path, tmp_path: Path, prompt: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """States are lost, with a warning."""
    folder = tmp_path / "a" / "b"
    with open_generator(tiny_opt, folder, hh=40) as generator:
        text = generate_kept(generator, prompt)[0].text
        folder.rmdir()
    assert text
    assert "cannot be written" in caplog.text


def test_path_that_is_not_a_directory(tiny_opt: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OSError, match="file"):
        open_generator(tiny_opt, file)


def test_two_open_generators_share_a_directory(
    tiny_opt: Path, tmp_path: Path, prompt: list[int]
) -> None:
    with (
        open_generator(tiny_opt, tmp_path, hh=40) as one,
        open_generator(tiny_opt, tmp_path, hh=40) as two,
    ):
        assert generate_kept(one, prompt)[0].text == generate_kept(two, prompt)[0].text
    assert len(files(tmp_path)) == 3  # a chunk, the prompt and the output
