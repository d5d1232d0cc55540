"""Random sequences of a Generator's operations, compared with single generations."""

from __future__ import annotations

import gc
import itertools
import signal
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    precondition,
    rule,
)

from h2o_cpp import Completion, Engine, Generation, Generator, Snapshot, Stream
from support.random_search import examples

LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"
N_VOCAB = 61
HAS_SIGNALS = hasattr(signal, "SIGUSR1")


def open_generator(max_sequences: int, draft: str | None = None) -> Generator:
    return Generator(LLAMA, hh=12, n_batch=8, max_sequences=max_sequences, threads=1, draft=draft)


@dataclass(frozen=True)
class Request:
    """A prompt, its generation options, and the position of its stop string."""

    prompt: tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int
    ignore_eos: bool
    stop_at: int | None  # where in the output its stop string starts

    def options(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "stop": self.stop(),
        }

    def stop(self) -> list[str]:
        """A stop string that occurs, one that only starts to, and one that never occurs."""
        if self.stop_at is None:
            return []
        whole = expected(Request(**{**self.__dict__, "stop_at": None})).text
        found = whole[self.stop_at : self.stop_at + 3]
        return [found, found[:2] + "\0", "\0"] if len(found) == 3 else ["\0"]


@cache
def reference() -> Generator:
    return open_generator(1)


@cache
def expected(text: Request) -> Generation:
    return reference().generate(
        text.prompt, seed=text.seed, max_tokens=text.max_tokens, **text.options()
    )


TEXTS = st.builds(
    Request,
    prompt=st.lists(st.integers(3, N_VOCAB - 1), min_size=1, max_size=20).map(tuple),
    seed=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 1.5]),
    max_tokens=st.integers(1, 40),
    ignore_eos=st.booleans(),
    stop_at=st.none() | st.integers(0, 30),
)


@dataclass(eq=False)
class Reading:
    """An output that is being read."""

    text: Request
    source: Stream | Completion
    so_far: str = ""
    n_before: int = 0  # tokens generated before the snapshot from which it continues
    is_open: bool = True  # its Generator and its Engine
    others: list[Reading] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return self.n_before + len(self.source.tokens)

    def read(self, n: int | None) -> None:
        """Read at most n pieces (None: all) and compare with the expected output."""
        if not self.is_open:
            return
        pieces = list(itertools.islice(self.source, n))
        self.so_far += "".join(pieces)
        whole = expected(self.text)
        if n is None or len(pieces) < n:
            assert self.so_far == whole.text
            assert self.source.finish_reason == whole.finish_reason
            assert self.n_tokens == whole.completion_tokens
        else:
            assert whole.text.startswith(self.so_far)


@dataclass
class Saved:
    """A snapshot within an output whose first characters have been read."""

    reading: Request
    so_far: str
    n_tokens: int
    snapshot: Snapshot


class WholeSurface(RuleBasedStateMachine):
    """With two sequences, so that streams are paused, and sometimes an engine."""

    streams = Bundle("streams")
    completions = Bundle("completions")
    snapshots = Bundle("snapshots")

    @initialize(draft=st.sampled_from([None, "lookup"]))
    def open(self, draft: str | None) -> None:
        gc.freeze()  # objects of other tests would slow down each collection
        self.folder = tempfile.TemporaryDirectory()
        self.draft = draft
        self.generator = open_generator(2, draft)
        self.engine: Engine | None = None
        self.of_generator: list[Reading] = []
        self.of_engine: list[Reading] = []

    def teardown(self) -> None:
        self.generator.close()
        self.folder.cleanup()
        gc.unfreeze()

    def stream_of(self, text: Request) -> Reading:
        options = {"seed": text.seed, "max_tokens": text.max_tokens, **text.options()}
        self.of_generator.append(Reading(text, self.generator.stream(text.prompt, **options)))
        return self.of_generator[-1]

    @rule(target=streams, text=TEXTS)
    def stream(self, text: Request) -> Reading:
        return self.stream_of(text)

    @rule(reading=streams, n=st.integers(1, 6))
    def read(self, reading: Reading, n: int) -> None:
        reading.read(n)

    @rule(reading=consumes(streams))
    def read_all(self, reading: Reading) -> None:
        reading.read(None)

    @rule(reading=consumes(streams), how=st.sampled_from(["close", "drop", "cycle"]))
    def leave(self, reading: Reading, how: str) -> None:
        if reading in self.of_generator:
            self.of_generator.remove(reading)
        reading.is_open = False
        if how == "close":
            reading.source.close()
            assert reading.source.finish_reason is not None
        elif how == "cycle":
            reading.others.append(reading)

    @rule()
    def collect_garbage(self) -> None:
        gc.collect()

    @rule(target=snapshots, reading=streams, by_file=st.booleans())
    def save(self, reading: Reading, by_file: bool) -> Any:
        if isinstance(reading.source, Completion) or not (reading.is_open and reading.source.began):
            return multiple()
        if reading.source.finish_reason is not None:
            return multiple()
        path = Path(self.folder.name) / "snapshot"
        snapshot = reading.source.save(path)
        n_tokens = reading.n_tokens  # load() may run a step, which decodes another one
        if by_file:
            snapshot = self.generator.load(path)
        return Saved(reading.text, reading.so_far, n_tokens, snapshot)

    @rule(target=streams, saved=snapshots)
    def continue_from(self, saved: Saved) -> Reading:
        options = {
            "max_tokens": saved.reading.max_tokens - saved.n_tokens,
            **saved.reading.options(),
        }
        stream = self.generator.stream("", after=saved.snapshot, **options)
        self.of_generator.append(Reading(saved.reading, stream, saved.so_far, saved.n_tokens))
        return self.of_generator[-1]

    @rule(texts=st.lists(TEXTS, min_size=1, max_size=4))
    def batch(self, texts: list[Request]) -> None:
        each: list[Any] = [
            {"seed": t.seed, "max_tokens": t.max_tokens, **t.options()} for t in texts
        ]
        found = self.generator.generate([list(t.prompt) for t in texts], each=each)
        assert [generation.text for generation in found] == [expected(t).text for t in texts]

    @precondition(lambda self: self.engine is None)
    @rule()
    def begin_engine(self) -> None:
        self.engine = self.generator.engine(max_queue=3)

    @precondition(lambda self: self.engine is not None)
    @rule(target=completions, text=TEXTS)
    def submit(self, text: Request) -> Reading:
        assert self.engine is not None
        options = {"seed": text.seed, "max_tokens": text.max_tokens, **text.options()}
        self.of_engine.append(Reading(text, self.engine.submit(text.prompt, **options)))
        return self.of_engine[-1]

    @rule(reading=consumes(completions), n=st.none() | st.integers(0, 5))
    def read_completion(self, reading: Reading, n: int | None) -> None:
        """Read all of it, or a part before it is dropped."""
        if n is None:
            reading.read(None)
        else:
            reading.so_far += "".join(itertools.islice(reading.source, n))
            assert not reading.is_open or expected(reading.text).text.startswith(reading.so_far)
        if reading in self.of_engine:
            self.of_engine.remove(reading)

    @precondition(lambda self: self.engine is not None)
    @rule()
    def end_engine(self) -> None:
        assert self.engine is not None
        self.engine.close()
        for reading in self.of_engine:
            assert reading.source.finish_reason is not None
            reading.is_open = False
        self.engine, self.of_engine = None, []

    @precondition(lambda _: HAS_SIGNALS)
    @rule(reading=streams, other=TEXTS)
    def interrupt(self, reading: Reading, other: Request) -> None:
        """A handler between pieces generates and raises; the stream can continue."""

        def handle(*_: object) -> None:
            self.stream_of(other).read(None)
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            reading.read(1)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGUSR1)
            reading.read(1)
        finally:
            signal.signal(signal.SIGUSR1, before)

    @rule(text=TEXTS)
    def look(self, text: Request) -> None:
        self.generator.stats(layers=True)
        assert self.generator.logits(text.prompt).shape == (len(text.prompt), N_VOCAB)
        assert list(self.generator.read(text.prompt).tokens) == list(text.prompt)

    @rule()
    def close_and_open(self) -> None:
        """Streams end, snapshots remain valid."""
        stream = self.generator.stream([5], seed=1, ignore_eos=True)
        next(stream)
        self.generator.close()
        with pytest.raises(RuntimeError, match="closed"):
            list(stream)
        with pytest.raises(RuntimeError, match="closed"):
            self.generator.generate([5])
        for reading in [*self.of_generator, *self.of_engine]:
            reading.is_open = False
            if reading.source.finish_reason not in (None, "cancelled"):
                continue
            if isinstance(reading.source, Stream):
                with pytest.raises(RuntimeError, match="closed"):
                    list(reading.source)
            else:  # pieces already in its queue
                text = reading.so_far + "".join(reading.source)
                assert expected(reading.text).text.startswith(text)
        self.generator, self.engine = open_generator(2, self.draft), None
        self.of_generator, self.of_engine = [], []


WholeSurface.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40)
TestWholeSurface = WholeSurface.TestCase
