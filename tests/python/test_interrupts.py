"""A Generator stays usable after streams are dropped, closed, exhausted or interrupted."""

from __future__ import annotations

import gc
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import h2o_cpp
from h2o_cpp import Generator, Stream
from support.background import GREEDY, PATIENCE, PROMPT, Background, assert_usable, greedy
from support.needs import needs


@pytest.mark.parametrize("n_read", [0, 1, 5])
def test_generator_is_usable_after_dropped_stream(
    generator: Generator, expected: str, n_read: int
) -> None:
    stream = generator.stream("Another text", max_tokens=50, seed=1)
    for _ in range(n_read):
        next(stream)
    del stream
    assert_usable(generator, expected)


def test_generator_is_usable_after_stream_dropped_in_cycle(
    generator: Generator, expected: str
) -> None:
    cycle: list[Any] = [generator.stream("Another text", seed=1)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()
    assert_usable(generator, expected)


def test_generator_is_usable_after_stream_dropped_in_thread(
    generator: Generator, expected: str
) -> None:
    Background(lambda: next(generator.stream("Another text", seed=1))).result()
    assert_usable(generator, expected)


@pytest.mark.parametrize("n_read", [0, 1, 5])
def test_generator_is_usable_after_closed_stream(
    generator: Generator, expected: str, n_read: int
) -> None:
    stream = generator.stream("Another text", max_tokens=50, seed=1)
    for _ in range(n_read):
        next(stream)
    stream.close()
    assert_usable(generator, expected)
    assert stream.finish_reason == "cancelled"
    assert next(stream, None) is None


def test_generator_is_usable_after_exhausted_stream(generator: Generator, expected: str) -> None:
    stream = generator.stream("Another text", max_tokens=5, seed=1)
    assert "".join(stream)
    assert_usable(generator, expected)
    assert stream.finish_reason == "length"


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, GeneratorExit])
def test_generator_is_usable_after_exception_in_consumer(
    generator: Generator, expected: str, error: type[BaseException]
) -> None:
    def consume() -> None:
        with generator.stream("Another text", max_tokens=50, seed=1) as stream:
            for n, _ in enumerate(stream):
                if n == 3:
                    raise error

    with pytest.raises(error):
        consume()
    assert_usable(generator, expected)


def test_stream_continues_after_exception_in_consumer(generator: Generator, expected: str) -> None:
    stream = generator.stream(PROMPT, **GREEDY)
    pieces = []
    with suppress(KeyboardInterrupt):
        for piece in stream:
            pieces.append(piece)
            raise KeyboardInterrupt
    assert greedy(generator) == expected
    assert "".join([*pieces, *stream]) == expected
    assert_usable(generator, expected)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_generator_is_usable_after_exception_during_step(
    generator: Generator, expected: str, error: type[BaseException]
) -> None:
    """The constraint callback raises."""
    n_calls = itertools.count()

    def fail(tokens: Any, mask: Any) -> None:
        mask[:] = 2**32 - 1
        if next(n_calls) == 3:
            raise error

    stream = generator.stream("Another text", max_tokens=50, constraint=fail, ignore_eos=True)
    with pytest.raises(error):
        list(stream)
    assert stream.finish_reason == "cancelled"
    assert len(stream.tokens) == 3
    assert next(stream, None) is None
    assert_usable(generator, expected)


@pytest.mark.parametrize("call", [lambda g: g.logits([5, 6]), lambda g: g.read("a"), greedy])
def test_other_calls_of_the_thread_do_not_disturb_its_stream(
    generator: Generator, expected: str, call: Callable[[Generator], object]
) -> None:
    stream = generator.stream(PROMPT, **GREEDY)
    pieces = [next(stream)]
    call(generator)
    assert "".join([*pieces, *stream]) == expected


def test_signal_handler_can_generate(generator: Generator, expected: str) -> None:
    """The handler interrupts a computation of the same thread."""
    texts = []

    def handle(*_: object) -> None:
        texts.append(greedy(generator))

    before = signal.signal(signal.SIGALRM, handle)
    try:
        stream = generator.stream([5 + i % 4000 for i in range(1500)], max_tokens=400, seed=1)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        for _ in stream:
            pass
        while not texts:
            time.sleep(0.001)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert texts == [expected]
    assert stream.finish_reason is not None


def test_read_only_calls_do_not_end_a_stream(generator: Generator, expected: str) -> None:
    stream = generator.stream(PROMPT, **GREEDY)
    pieces = [next(stream)]
    generator.tokenize("a")
    generator.detokenize([5])
    assert generator.stats().tokens_seen > 0
    assert generator.kept(0, 0)[0].size > 0
    unused = generator.stream("Another text")
    assert "".join(pieces + list(stream)) == expected
    unused.close()


def test_dropping_a_stream_runs_no_python(generator: Generator, expected: str) -> None:
    """Python would ignore a KeyboardInterrupt in __del__, which then would be lost."""
    stream = generator.stream("Another text", seed=1)
    next(stream)
    package = str(Path(h2o_cpp.__file__).parent)
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        del stream
    finally:
        sys.setprofile(None)
    assert not called
    assert_usable(generator, expected)


def test_del_of_uninitialized_stream() -> None:
    """The object of a failed constructor can be deleted."""
    with pytest.raises(TypeError):
        Stream()  # type: ignore[call-arg]
    Stream.__new__(Stream)


def read_new_tokens(generator: Generator) -> None:
    generator.read([5, *divmod(next(_NEW_TOKENS), 4000)])


def generate_and_save(generator: Generator) -> None:
    generator.generate(PROMPT, temperature=0, max_tokens=2)
    generator.load(generator.save())


_NEW_TOKENS = itertools.count(7)


@pytest.mark.parametrize(
    ("work", "other_first"),
    [
        (lambda g: g.generate(PROMPT, temperature=0, max_tokens=3, stop="no such text"), True),
        (lambda g: g.generate([[5, 6], [7]], temperature=0, max_tokens=2), False),
        (lambda g: g.logits([5, 6, 7]), True),
        (read_new_tokens, True),
        (generate_and_save, True),
    ],
    ids=["generate", "batch", "logits", "read", "save"],
)
def test_generator_is_usable_after_keyboard_interrupt_anywhere(
    tiny_opt: Path, expected: str, work: Callable[[Generator], object], other_first: bool
) -> None:
    """A KeyboardInterrupt at every point where Python checks for signals; tracebacks are kept.

    These are the starts of h2o_cpp's functions and the returns from C functions to them. After each
    interrupt, the same thread and another one use the Generator, in either order.
    """
    package = str(Path(h2o_cpp.__file__).parent)
    places = ["nowhere"]

    def interrupt(generator: Generator, fuse: int) -> KeyboardInterrupt | None:
        """Call work() with an interrupt at check number `fuse`; the error, or None."""

        def interrupt_at_fuse(frame: FrameType, event: str, _: object) -> None:
            nonlocal fuse
            file, caller = frame.f_code.co_filename, frame.f_back
            names = {frame.f_code.co_name, caller.f_code.co_name if caller else ""}
            if "__del__" in names:  # where Python ignores exceptions
                return
            fuse -= event in ("call", "c_return") and file.startswith(package)
            if fuse == 0:
                places.append(f"{Path(file).name}:{frame.f_lineno} {event}")
                raise KeyboardInterrupt

        sys.setprofile(interrupt_at_fuse)
        try:
            work(generator)
        except KeyboardInterrupt as error:
            return error
        finally:
            sys.setprofile(None)
        return None

    def interrupt_everywhere() -> int:
        generator = Generator(tiny_opt, threads=1)
        errors = []
        for fuse in itertools.count(1):
            errors.append(interrupt(generator, fuse))
            if errors[-1] is None:
                break
            if other_first:
                Background(lambda: work(generator)).result(10)
            work(generator)
            Background(lambda: work(generator)).result(10)
        assert_usable(generator, expected)
        return len(errors)

    thread = Background(interrupt_everywhere)
    try:
        assert thread.result() > 8
    except AssertionError as error:
        raise AssertionError(f"interrupted at {places[-1]}") from error


@needs("POSIX timers", hasattr(signal, "setitimer"))
@pytest.mark.parametrize(
    "work",
    [
        "for _ in generator.stream(PROMPT, ignore_eos=True): pass",
        "for _ in generator.stream(TOKENS): pass",
        "generator.generate(TOKENS[:1500])",
        "generator.logits(TOKENS)",
    ],
    ids=["stream", "prefill", "generate", "logits"],
)
def test_generator_is_usable_after_sigint(tiny_opt: Path, expected: str, work: str) -> None:
    """A real SIGINT at ten times during long computations; every other error is kept alive."""
    program = f"""
import signal
from h2o_cpp import Generator
PROMPT, TOKENS = {PROMPT!r}, [5 + i % 4000 for i in range(2048)]
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
generator = Generator({str(tiny_opt)!r}, n_batch=64, threads=1)
kept = []
for n in range(10):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.017 * n)
        while True:
            {work}
    except KeyboardInterrupt as error:
        kept.append(error if n % 2 else None)
    assert generator.generate(PROMPT, **{GREEDY!r}).text == {expected!r}
print(len(kept))
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (result.stdout, result.stderr) == ("10\n", "")
