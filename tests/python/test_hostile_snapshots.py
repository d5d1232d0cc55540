"""Snapshots with invalid contents and a valid checksum raise ValueError without side effects."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_cpp import Chat, Generator, Snapshot
from support.random_search import examples
from support.snapshots import sealed

TOKENS = 44  # offset of the tokens, after the header, the model and their count
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<reply>"


@pytest.fixture(scope="module")
def generator(llama: Path) -> Generator:
    return Generator(llama, hh=8, n_batch=8, threads=1)


@pytest.fixture(scope="module")
def saved(generator: Generator) -> Snapshot:
    stream = generator.stream([5, 6, 7], seed=1, ignore_eos=True, temperature=1.0)
    next(stream)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return stream.save(note=messages)


def entries(generator: Generator, path: Path) -> Iterator[Callable[[], object]]:
    """All calls that take a snapshot."""

    def generate() -> object:
        return generator.generate([5], after=Snapshot.open(path), max_tokens=3)

    def submit() -> object:
        with generator.engine() as engine:
            return engine.submit([5], after=Snapshot.open(path), max_tokens=3).result()

    yield lambda: generator.load(path)
    yield generate
    yield submit
    yield lambda: generator.generate([[5], [6]], after=Snapshot.open(path), max_tokens=3)
    yield lambda: list(Chat.load(generator, path, template=TEMPLATE).say("a", max_tokens=3))


def assert_rejected(generator: Generator, data: bytes, path: Path, message: str) -> None:
    expected = generator.generate([9], max_tokens=5, temperature=0).text
    path.write_bytes(data)
    for call in entries(generator, path):
        with pytest.raises(ValueError, match=message):
            call()
    assert generator.generate([9], max_tokens=5, temperature=0).text == expected


@pytest.mark.parametrize("token", [-1, 61, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("place", [0, -1])
def test_tokens_outside_vocabulary_are_rejected(
    generator: Generator, saved: Snapshot, tmp_path: Path, token: int, place: int
) -> None:
    at = TOKENS + 4 * (place % len(saved.tokens))
    data = saved.data[:at] + struct.pack("<i", token) + saved.data[at + 4 :]
    assert_rejected(generator, sealed(data), tmp_path / "a", rf"token {token}\b")


@pytest.mark.parametrize(
    "state",
    [b"x", b"-", b"1 2 3", b"9" * 5000, b"\xff\xfe", b"\0" * 9, b"[1, 2]", b"1e400 " * 400],
    ids=repr,
)
def test_invalid_random_states_are_rejected(
    generator: Generator, saved: Snapshot, tmp_path: Path, state: bytes
) -> None:
    assert saved.random_state is not None
    good = saved.random_state.encode()
    at = saved.data.index(good)
    data = saved.data[: at - 8] + struct.pack("<Q", len(state)) + state
    data = sealed(data + saved.data[at + len(good) :])
    message = "random state is invalid|not saved by h2o"
    assert_rejected(generator, data, tmp_path / "a", message)


@given(st.data())
@settings(max_examples=examples(60))
def test_random_changes_raise_value_error_or_load(
    generator: Generator,
    saved: Snapshot,
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    changed = bytearray(saved.data)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(28, len(changed)) | st.integers(28, 200))
        with_ = data.draw(
            st.binary(max_size=8)
            | st.sampled_from(
                [bytes(8), b"\xff" * 8, b"\xff\xff\xff\x7f", struct.pack("<Q", 2**63)]
            )
        )
        changed[at : at + data.draw(st.sampled_from([len(with_), 0]))] = with_
    path = tmp_path_factory.getbasetemp() / "changed"
    path.write_bytes(sealed(bytes(changed)))
    for call in entries(generator, path):
        with suppress(ValueError):
            call()
    assert generator.generate([9], max_tokens=5, ignore_eos=True).completion_tokens == 5
