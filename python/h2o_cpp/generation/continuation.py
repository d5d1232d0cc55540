"""Continuations: the text that a request becomes, token by token, until it ends."""

from __future__ import annotations

import threading
from array import array
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.generation.request import Request
from h2o_cpp.generation.runtime import Runtime
from h2o_cpp.generation.snapshot import Snapshot
from h2o_cpp.generation.text_pieces import TextPieces
from h2o_cpp.generation.turn import Turn
from h2o_cpp.model.session import Following


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


@dataclass(eq=False)
class Text:
    """A text that is read and continued. It holds the turn in its stream's name, so that the
    stream can be dropped."""

    tokens: array[int]  # all of it, of the snapshot it follows, the prompt and generated
    sampler: _core.Sampler
    in_cache: bool = False  # whether sequence 0 holds nothing but this text
    busy: threading.Lock = field(default_factory=threading.Lock)  # held while it is computed

    def save(self, turn: Turn, session: _core.Session, note: Any = None) -> Snapshot:
        """A snapshot of it. Raises RuntimeError unless sequence 0 of the session holds it."""
        with self.busy:
            if turn.holds(self) and self.in_cache:
                return self._snapshot(session, note)
        with turn.alone():
            if turn.settle(changes=False) is not self or not self.in_cache:
                raise RuntimeError("the cache does not hold this text")
            return self._snapshot(session, note)

    def _snapshot(self, session: _core.Session, note: Any) -> Snapshot:
        return Snapshot.take(session, self.tokens, self.sampler.random_state, note)


class Continuation:
    """What follows a prompt. It is given what follows each token, and says what that adds.

    Which sequence computes them, and with which others, is not its subject.
    """

    def __init__(self, runtime: Runtime, request: Request) -> None:
        self.request = request
        self.tokens: array[int] = array("i")  # generated
        self.finish_reason: str | None = None  # as in Generation
        self.finish_message = ""
        self.error: Exception | None = None  # what ended it, if one did
        self.said = StringIO()  # the pieces that somebody has been given
        self.prompt_tokens = len(request.prompt)  # read
        self.prompt_seconds = 0.0
        self.decode_seconds = 0.0
        self.text = Text(array("i", request.tokens()), request.sampling.sampler())
        for token in request.sampling.recent(self.text.tokens):
            self.text.sampler.accept(token)
        self._pieces = TextPieces(request.stop)
        self._begins = not runtime.tokenizer.has_text(self.text.tokens)  # no text yet

    def unread(self, n_seen: int) -> NDArray[np.int32]:
        """The tokens that a sequence which has seen `n_seen` of them has not."""
        return np.asarray(self.text.tokens[n_seen:], np.int32)

    def push(self, runtime: Runtime, sequence: int, following: Following) -> str:
        """Choose the next token from what follows the last of a sequence; the text it completes."""
        tokenizer = runtime.tokenizer
        sampler = self.text.sampler
        token = following if isinstance(following, int) else sampler.sample(following)
        if token in tokenizer.end_tokens and not self.request.ignore_eos:
            return self.end("stop")
        self.text.sampler.accept(token)
        self.tokens.append(token)
        self.text.tokens.append(token)
        if self.request.record is not None and not isinstance(following, int):
            self.request.record.tokens(following[np.newaxis], np.array([token], np.int32))
        data = tokenizer.token_bytes(token, begins=self._begins)
        self._begins = self._begins and not tokenizer.has_text([token])
        piece = self._pieces.push(data)
        if self._pieces.stopped:
            return piece + self.end("stop")
        if len(self.tokens) == self.request.max_tokens:
            return piece + self.end("length")
        if runtime.session.room(sequence) == 0:
            self.finish_message = f"the context is full: {runtime.limit()}"
            return piece + self.end("length")
        return piece

    def end(self, reason: str, error: Exception | None = None) -> str:
        """End it, unless it has ended; returns the text that was held back for a stop string."""
        if self.finish_reason is None:
            self.finish_reason, self.error = reason, error
        return self._pieces.finish()

    def generation(self) -> Generation:
        """What it amounted to."""
        return Generation(
            text=self.said.getvalue(),
            finish_reason=self.finish_reason or "cancelled",
            finish_message=self.finish_message,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.tokens),
            prompt_seconds=self.prompt_seconds,
            decode_seconds=self.decode_seconds,
        )
