"""Reentrant calls of a Generator: from constraints, destructors and signal handlers.

Each succeeds or raises RuntimeError; none deadlocks.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import h2o_cpp
from h2o_cpp import Generator
from support.background import GREEDY, PATIENCE, PROMPT, assert_usable, greedy
from support.needs import needs

SIGNALS = needs("POSIX signals", hasattr(signal, "SIGUSR1"))
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 3}
REJECTED = "a constraint called the engine that is waiting for it"


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    """Exit with a traceback on a deadlock."""
    faulthandler.dump_traceback_later(3 * PATIENCE, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def by_engine(generator: Generator) -> object:
    with generator.engine() as engine:
        return engine.submit(PROMPT, **SHORT).result()


async def by_task(generator: Generator) -> object:
    with generator.engine() as engine:
        return await engine.submit(PROMPT, **SHORT)


CALLS: dict[str, Callable[[Generator], object]] = {
    "generate": greedy,
    "stream": lambda g: next(g.stream(PROMPT)),
    "batch": lambda g: g.generate([PROMPT, "a"], **SHORT),
    "logits": lambda g: g.logits([5, 6]),
    "read": lambda g: g.read("never read before"),
    "save": lambda g: g.save(),
    "load": lambda g: g.load(next(iter(g._snapshots._snapshots.values()))),
    "engine": by_engine,
    "asyncio": lambda g: asyncio.run(by_task(g)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("eager", [False, True], ids=["here", "elsewhere"])
def test_constraint_that_calls_its_generator(
    generator: Generator, expected: str, call: Callable[[Generator], object], eager: bool
) -> None:
    """In the calling thread, or in the engine's thread."""
    generator.read("a system prompt")
    messages = []

    def allow_all(_: Any, mask: Any) -> None:
        mask[:] = 2**32 - 1
        with pytest.raises(RuntimeError) as error:
            call(generator)
        messages.append(str(error.value))
        generator.stats()
        generator.tokenize("a")

    options: dict[str, Any] = {**SHORT, "constraint": allow_all}
    texts = generator.generate([PROMPT], **options) if eager else []
    text = texts[0] if texts else generator.generate(PROMPT, **options)
    assert expected.startswith(text.text)
    assert len(messages) == 3
    assert all(message.startswith(REJECTED) for message in messages)
    assert_usable(generator, expected)


def test_constraint_that_continues_stream_many(generator: Generator) -> None:
    """A stream that was started outside the constraint."""
    pieces = generator.stream_many(["a", "b"], max_tokens=200, ignore_eos=True, seed=1)
    next(pieces)

    def allow_all(_: Any, mask: Any) -> None:
        mask[:] = 2**32 - 1
        for _piece in pieces:
            pass

    with pytest.raises(RuntimeError, match=REJECTED):
        generator.generate(PROMPT, constraint=allow_all, **SHORT)


def test_constraint_that_closes_its_generator(generator: Generator) -> None:
    def close(_: Any, mask: Any) -> None:
        mask[:] = 2**32 - 1
        generator.close()

    with pytest.raises(RuntimeError, match="this Generator is closed"):
        "".join(generator.stream(PROMPT, constraint=close, **SHORT))
    generator.close()


def test_constraint_that_drops_the_last_reference_to_its_engine(tiny_opt: Path) -> None:
    """In the engine's own thread, which then ends."""
    program = f"""
import gc, time, weakref
from h2o_cpp import Generator
kept = [Generator({str(tiny_opt)!r}, threads=1)]
def drop(tokens, mask):
    mask[:] = 2**32 - 1
    while len(kept) < 3:  # until submit() has returned
        time.sleep(0.001)
    kept.clear()
    gc.collect()
    print("dropped")
kept.append(kept[0].engine())
kept.append(kept[1].submit("a", constraint=drop, max_tokens=5, ignore_eos=True))
ended = weakref.ref(drop)
del drop
while ended() is not None:
    pass
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (0, "dropped\n", "")


@SIGNALS
def test_signal_handler_within_a_constraint(generator: Generator, expected: str) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: greedy(generator))
    try:

        def allow_all(_: Any, mask: Any) -> None:
            mask[:] = 2**32 - 1
            signal.raise_signal(signal.SIGUSR1)

        with pytest.raises(RuntimeError, match=REJECTED):
            generator.generate(PROMPT, constraint=allow_all, **SHORT)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert_usable(generator, expected)


class GenerateOnDelete:
    """Generates in its destructor."""

    def __init__(self, generator: Generator, texts: list[str]) -> None:
        self.cycle = self  # so that only the garbage collector destroys it
        self.generator, self.texts = generator, texts

    def __del__(self) -> None:
        try:
            self.texts.append(greedy(self.generator))
        except RuntimeError as error:
            self.texts.append(str(error))


def test_destructors_run_by_the_garbage_collector(generator: Generator, expected: str) -> None:
    """Between pieces they succeed, within a constraint they raise."""
    texts: list[str] = []
    pieces = []
    stream = generator.stream(PROMPT, **GREEDY)
    for n, piece in enumerate(stream):
        pieces.append(piece)
        if n in (0, 1, 10):
            GenerateOnDelete(generator, texts)
            gc.collect()
    assert "".join(pieces) == expected
    assert texts == [expected] * 3
    texts.clear()

    def allow_all(_: Any, mask: Any) -> None:
        mask[:] = 2**32 - 1
        GenerateOnDelete(generator, texts)
        gc.collect()

    generator.generate(PROMPT, constraint=allow_all, **SHORT)
    assert len(texts) == 3
    assert all(text.startswith(REJECTED) for text in texts)
    assert_usable(generator, expected)


def test_gc_stress(generator: Generator, expected: str) -> None:
    """A collection at every allocation, with garbage streams, batches and engines."""

    def make_garbage() -> None:
        cycle: list[Any] = [
            generator.stream("a", seed=1),
            generator.stream_many(["a", "b"], max_tokens=2),
            generator.read("a"),
        ]
        next(cycle[0])
        cycle.append(cycle)

    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(5):
            make_garbage()
            assert greedy(generator) == expected
            with generator.engine() as engine:
                completion = engine.submit(PROMPT, **GREEDY)
                make_garbage()
                assert completion.result().text == expected
                engine.submit("b", max_tokens=50, ignore_eos=True)  # result dropped
    finally:
        gc.set_threshold(*threshold)
    assert_usable(generator, expected)


_UNREAD = itertools.count(7)

WORK: dict[str, Callable[[Generator], object]] = {
    "generate": lambda g: g.generate(PROMPT, stop="no such text", **SHORT).text,
    "batch": lambda g: [text.text for text in g.generate([[5, 6], [7]], **SHORT)],
    "read": lambda g: len(g.read([5, *divmod(next(_UNREAD), 4000)]).tokens),
}


@pytest.mark.parametrize("outer", WORK)
@pytest.mark.parametrize("inner", WORK)
def test_reentrant_call_at_any_point(tiny_opt: Path, outer: str, inner: str) -> None:
    """Stands for a signal handler or destructor: at each call and return within h2o_cpp."""
    package = str(Path(h2o_cpp.__file__).parent)
    generator = Generator(tiny_opt, threads=1, snapshot_bytes=100_000)
    expected = [WORK[name](generator) for name in (outer, inner)]

    def call_after(left: int) -> bool:
        """Whether the outer call had that many calls and returns."""
        found: list[object] = []

        def countdown(frame: Any, event: str, _: object) -> None:
            nonlocal left
            left -= event in ("call", "c_return") and frame.f_code.co_filename.startswith(package)
            if left == 0:
                sys.setprofile(None)
                found.append(WORK[inner](generator))

        sys.setprofile(countdown)
        try:
            assert WORK[outer](generator) == expected[0]
        finally:
            sys.setprofile(None)
        assert found in ([], expected[1:])
        return bool(found)

    n = 1
    while call_after(n):
        n += 1
    assert n > 8
