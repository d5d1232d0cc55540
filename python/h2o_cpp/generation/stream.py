"""One generation: the stream of text pieces, and what it amounted to."""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np

from h2o_cpp.generation.closing import Closing
from h2o_cpp.generation.continuation import Continuation, Generation
from h2o_cpp.generation.request import Request
from h2o_cpp.generation.runtime import Runtime
from h2o_cpp.generation.snapshot import Snapshot
from h2o_cpp.generation.turn import Turn
from h2o_cpp.model.session import Following, step


class Stream(Iterator[str], Closing):
    """Pieces of text as they are generated, each valid Unicode.

    Nothing is computed before the first piece is asked for. Ending, closing or dropping the stream
    frees the Generator for the next one.
    """

    def __init__(self, runtime: Callable[[], Runtime], turn: Turn, request: Request) -> None:
        """`runtime` gives what to run on, or raises RuntimeError when it has been closed."""
        self._runtime = runtime
        self._request = request
        self._continuation = Continuation(runtime(), request)
        self._following: Following | None = None  # the newest token
        self._turn = turn
        self._resumed: object = None  # the text of the stream whose cache is kept
        self._text = self._continuation.text
        self._cancelled = False
        self._superseded = False

    def __repr__(self) -> str:
        return f"<Stream: {len(self.tokens)} tokens, {self.finish_reason or 'not ended'}>"

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        with self._text.busy:
            try:
                while self.finish_reason is None:
                    if piece := self._next_piece():
                        self._continuation.said.write(piece)
                        return piece
            except BaseException:  # KeyboardInterrupt too: the next stream must find its turn
                self._end("cancelled")
                raise
        if self._superseded and self.finish_reason == "cancelled":
            raise RuntimeError("this stream was ended: its thread began another one")
        raise StopIteration

    @property
    def text(self) -> str:
        """The pieces so far."""
        return self._continuation.said.getvalue()

    @property
    def tokens(self) -> array[int]:
        """The ids generated so far."""
        return self._continuation.tokens

    @property
    def finish_reason(self) -> str | None:
        """None while it runs, then as in Generation."""
        return self._continuation.finish_reason

    @property
    def finish_message(self) -> str:
        """As in Generation."""
        return self._continuation.finish_message

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that are read."""
        return self._continuation.prompt_tokens

    @property
    def prompt_seconds(self) -> float:
        """Spent reading them."""
        return self._continuation.prompt_seconds

    @property
    def decode_seconds(self) -> float:
        """Spent computing tokens after the first."""
        return self._continuation.decode_seconds

    def generation(self) -> Generation:
        """What it amounted to so far."""
        return self._continuation.generation()

    @property
    def history(self) -> list[int]:
        """All tokens so far: of the snapshot it follows, of the prompt, and generated."""
        return [*self._text.tokens]

    def follow(self, previous: Stream) -> None:
        """Keep the cache as `previous` has left it, unless another stream comes in between.

        For Chat: `previous` must have ended, and the prompt must begin with its history and go on
        after it.
        """
        self._resumed = previous._text if previous.began else previous._resumed

    @property
    def began(self) -> bool:
        """Whether anything has been read."""
        return self._text.in_cache

    @property
    def request(self) -> Request:
        """What it continues, and how."""
        return self._request

    def save(self, path: str | os.PathLike[str] | None = None, *, note: Any = None) -> Snapshot:
        """A snapshot of the text so far, also written to `path`; the stream can go on.

        note: whatever JSON can hold, to be found again in Snapshot.note.

        Raises RuntimeError if nothing has been read yet, or another text has since.
        """
        snapshot = self._text.save(self._turn, self._runtime().session, note)
        if path is not None:
            snapshot.save(path)
        return snapshot

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
        if self._text.busy.locked():
            return False
        self._end("cancelled")
        return True

    def __del__(self) -> None:
        if hasattr(self, "_text"):  # __init__ got that far
            self._turn.give_back(self._text)

    def _next_piece(self) -> str:
        """One step: the text it completes, often empty."""
        if self._cancelled:
            return self._end("cancelled")
        if self._following is None:
            self._following = self._read_prompt()
        else:
            self._following = self._decode()
        if self._cancelled:
            return self._end("cancelled")
        piece = self._continuation.push(self._runtime(), 0, self._following)
        if self.finish_reason is not None:
            self._turn.give_back(self._text)
        return piece

    def _read_prompt(self) -> Following:
        stream = weakref.ref(self)
        last = self._turn.take(self._text, lambda: _supersede(stream))
        runtime = self._runtime()
        session = runtime.session
        if self._request.after is not None:
            session.load(0, self._request.after.data)
        elif self._resumed is None or last is not self._resumed:
            session.reset(0)
        self._text.in_cache = True
        prompt = self._continuation.unread(session.tokens_seen(0))
        self._continuation.prompt_tokens = len(prompt)
        started = perf_counter()
        for part in runtime.chunks(prompt):
            (following,) = step(session, [(0, part)], greedy=self._request.greedy)
            self._continuation.prompt_seconds = perf_counter() - started
            if self._cancelled:
                break
        return following

    def _decode(self) -> Following:
        started = perf_counter()
        newest = np.asarray(self.tokens[-1:], np.int32)
        session = self._runtime().session
        (following,) = step(session, [(0, newest)], greedy=self._request.greedy)
        self._continuation.decode_seconds += perf_counter() - started
        return following

    def _end(self, reason: str) -> str:
        """Give the turn back; returns the text that was held back for a stop string."""
        self._turn.give_back(self._text)
        return self._continuation.end(reason)


def _supersede(stream: weakref.ref[Stream]) -> bool:
    alive = stream()
    if alive is None:
        return True
    alive._superseded = True
    return alive.close()
