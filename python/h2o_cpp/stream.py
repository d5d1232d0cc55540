"""One generation: the stream of text pieces, and what it amounted to."""

from __future__ import annotations

import os
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.session import chunks
from h2o_cpp.snapshot import Snapshot
from h2o_cpp.text_pieces import TextPieces
from h2o_cpp.tokenizer import TextTokenizer
from h2o_cpp.turn import Turn


class StreamOptions(TypedDict, total=False):
    """The keyword arguments of Generator.stream, which explains them."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    seed: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool
    parse_special: bool
    after: Snapshot | None


class ContextFullError(ValueError):
    """The prompt has more tokens than the context."""


class Engine(NamedTuple):
    """What a Generator runs on."""

    model: _core.Model
    session: _core.Session
    tokenizer: TextTokenizer

    def limit(self) -> str:
        """Why a text ends."""
        n_ctx = self.session.n_ctx
        if not self.model.learned_positions:
            return (
                f"n_ctx is {n_ctx}; a text goes on only where the policy evicts and positions roll"
            )
        if n_ctx < self.model.n_ctx_train:
            return f"n_ctx is {n_ctx}"
        return f"n_ctx is {n_ctx}, and the model has learned no positions after that"


@dataclass(eq=False)
class Text:
    """A text that is read and continued. It holds the turn in its stream's name, so that the
    stream can be dropped."""

    tokens: array[int]  # all of it, of the snapshot it follows, the prompt and generated
    sampler: _core.Sampler

    def snapshot(self, session: _core.Session, note: Any = None) -> Snapshot:
        """Of the session that has read it."""
        return Snapshot.take(session, self.tokens, self.sampler.random_state, note)


@dataclass(frozen=True)
class Request:
    """What to generate from, and when to end."""

    prompt: Sequence[int]
    after: Snapshot | None
    sampler: _core.Sampler
    max_tokens: int | None
    stop: Sequence[str]
    ignore_eos: bool


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    finish_reason is "stop" (end of text, or a stop string), "length" (max_tokens, or the end of
    the context) or "cancelled"; finish_message says why the context ended, or is empty.
    """

    text: str
    finish_reason: str
    finish_message: str
    prompt_tokens: int
    completion_tokens: int
    prompt_seconds: float
    decode_seconds: float


class Stream(Iterator[str]):
    """Pieces of text as they are generated, each valid Unicode.

    Nothing is computed before the first piece is asked for. Ending, closing or dropping the stream
    frees the Generator for the next one.

    Attributes: `tokens`, the ids generated so far; `finish_reason`, None while it runs, then as in
    Generation, as is `finish_message`; `prompt_tokens` read; `prompt_seconds` and `decode_seconds`
    spent computing.
    """

    def __init__(self, engine: Callable[[], Engine], turn: Turn, request: Request) -> None:
        """`engine` gives the model, or raises RuntimeError when it has been closed."""
        self.tokens: array[int] = array("i")
        self.finish_reason: str | None = None
        self.finish_message = ""
        self.prompt_tokens = len(request.prompt)
        self.prompt_seconds = 0.0
        self.decode_seconds = 0.0

        self._engine = engine
        self._request = request
        self._said = StringIO()
        self._begins = not engine().tokenizer.has_text(request.prompt)  # no text yet
        self._pieces = TextPieces(request.stop)
        self._logits: NDArray[np.float32] | None = None  # [1, n_vocab], after the newest token
        self._turn = turn
        self._resumed: object = None  # the text of the stream whose cache is kept
        self._in_cache = False  # whether the cache holds nothing but this stream's text
        before = () if request.after is None else request.after.tokens
        self._text = Text(array("i", [*before, *request.prompt]), request.sampler)
        self._running = threading.Lock()
        self._cancelled = False
        self._superseded = False

    def __repr__(self) -> str:
        return f"<Stream: {len(self.tokens)} tokens, {self.finish_reason or 'not ended'}>"

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        with self._running:
            try:
                while self.finish_reason is None:
                    if piece := self._next_piece():
                        self._said.write(piece)
                        return piece
            except BaseException:  # KeyboardInterrupt too: the next stream must find its turn
                self._end("cancelled")
                raise
        if self._superseded:
            raise RuntimeError("this stream was ended: its thread began another one")
        raise StopIteration

    @property
    def text(self) -> str:
        """The pieces so far."""
        return self._said.getvalue()

    @property
    def history(self) -> list[int]:
        """All tokens so far: of the snapshot it follows, of the prompt, and generated."""
        return [*self._text.tokens]

    def resume(self, previous: Stream) -> None:
        """Keep the cache as `previous` has left it, unless another stream comes in between.

        `previous` must have ended, and the prompt must begin with its history and go on after it.
        """
        self._resumed = previous._text if previous._in_cache else previous._resumed

    def save(self, path: str | os.PathLike[str] | None = None, *, note: Any = None) -> Snapshot:
        """A snapshot of the text so far, also written to `path`; the stream can go on.

        note: whatever JSON can hold, to be found again in Snapshot.note.

        Raises RuntimeError if nothing has been read yet, or another text has since.
        """
        snapshot = self._snapshot(note)
        if path is not None:
            snapshot.save(path)
        return snapshot

    def _snapshot(self, note: Any) -> Snapshot:
        with self._running:
            if self._turn.holds(self._text):
                return self._text.snapshot(self._engine().session, note)
        with self._turn.hold(changes=False) as last:
            if last is not self._text or not self._in_cache:
                raise RuntimeError("the cache does not hold this stream's text")
            return self._text.snapshot(self._engine().session, note)

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens read per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens decoded per second; the first comes with the prompt and does not count."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0

    def close(self) -> bool:
        """End the stream: now, or after the token that another thread is computing (False)."""
        self._cancelled = True
        if not self._running.acquire(blocking=False):
            return False
        try:
            self._end("cancelled")
        finally:
            self._running.release()
        return True

    def __del__(self) -> None:
        if hasattr(self, "_text"):  # __init__ got that far
            self._turn.give_back(self._text)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _next_piece(self) -> str:
        """One step: the text it completes, often empty."""
        if self._cancelled:
            return self._end("cancelled")
        if self._logits is None:
            self._logits = self._read_prompt()
        else:
            self._logits = self._decode()
        engine = self._engine()
        tokenizer = engine.tokenizer
        if self._cancelled:
            return self._end("cancelled")

        request = self._request
        token = request.sampler.sample(self._logits)
        if token in tokenizer.end_tokens and not request.ignore_eos:
            return self._end("stop")
        request.sampler.accept(token)
        self.tokens.append(token)
        self._text.tokens.append(token)
        data = tokenizer.token_bytes(token, begins=self._begins)
        self._begins = self._begins and not tokenizer.has_text([token])
        piece = self._pieces.push(data)
        if self._pieces.stopped:
            return piece + self._end("stop")
        if len(self.tokens) == request.max_tokens:
            return piece + self._end("length")
        if engine.session.room(0) == 0:
            self.finish_message = f"the context is full: {engine.limit()}"
            return piece + self._end("length")
        return piece

    def _read_prompt(self) -> NDArray[np.float32]:
        stream = weakref.ref(self)
        last = self._turn.take(self._text, lambda: _supersede(stream))
        session = self._engine().session
        if self._request.after is not None:
            session.load(0, self._request.after.data)
        elif self._resumed is None or last is not self._resumed:
            session.reset(0)
        self._in_cache = True
        prompt = np.asarray(self._text.tokens, np.int32)[session.tokens_seen(0) :]
        self.prompt_tokens = len(prompt)
        for token in self._text.tokens:
            self._request.sampler.accept(token)
        started = perf_counter()
        for part in chunks(session, prompt):
            logits = session.step([(0, part)])
            self.prompt_seconds = perf_counter() - started
            if self._cancelled:
                break
        return logits

    def _decode(self) -> NDArray[np.float32]:
        started = perf_counter()
        newest = np.asarray(self.tokens[-1:], np.int32)
        logits = self._engine().session.step([(0, newest)])
        self.decode_seconds += perf_counter() - started
        return logits

    def _end(self, reason: str) -> str:
        """Give the turn back; returns the text that was held back for a stop string."""
        if self.finish_reason is None:
            self.finish_reason = reason
        self._turn.give_back(self._text)
        return self._pieces.finish()


def _supersede(stream: weakref.ref[Stream]) -> bool:
    alive = stream()
    if alive is None:
        return True
    alive._superseded = True
    return alive.close()
