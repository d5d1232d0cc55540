"""Streams: one generation as pieces of text, and its result."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from h2o_cpp import _core
from h2o_cpp.generation.closing import Closing
from h2o_cpp.generation.prompt_memory import (
    NOTHING_DROPPED,
    NOTHING_LOST,
    PromptMemory,
    PromptParts,
)
from h2o_cpp.generation.request import Request
from h2o_cpp.generation.snapshot import Snapshot
from h2o_cpp.model.runtime import Runtime


@dataclass(frozen=True)
class Generation:
    """A finished generation; print() shows its text.

    finish_reason is "stop" (end of text, or a stop string), "length" (max_tokens, or the end of
    the context) or "cancelled". finish_message explains an end of the context; otherwise it is "".
    stop_string is the one that ended the text, or "".
    """

    text: str
    finish_reason: str
    finish_message: str
    prompt_tokens: int
    completion_tokens: int
    prompt_seconds: float
    decode_seconds: float
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    stop_string: str = ""
    drafted_tokens: int = 0  # proposed as drafts
    accepted_tokens: int = 0  # of these, generated
    prompt_memory: PromptMemory = NOTHING_LOST

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def of(state: _core.Generation, parts: PromptParts = NOTHING_DROPPED) -> Generation:
        """The result of an engine's generation so far; parts: of its prompt."""
        return Generation(
            text=state.text,
            finish_reason=state.finish_reason or "cancelled",
            finish_message=state.finish_message,
            prompt_tokens=state.prompt_tokens,
            completion_tokens=state.n_generated,
            prompt_seconds=state.prompt_seconds,
            decode_seconds=state.decode_seconds,
            cached_tokens=state.cached_tokens,
            stop_string=state.stop_string,
            drafted_tokens=state.n_drafted,
            accepted_tokens=state.n_accepted,
            prompt_memory=parts.memory(state),
        )


class GenerationHandle(Closing):
    """The common part of Stream and Completion: a generation that is still running, or its end."""

    _state: _core.Generation  # cancels the request when it is dropped
    _closed = False
    _parts = NOTHING_DROPPED

    def __repr__(self) -> str:
        reason = self.finish_reason or "not ended"
        return f"<{type(self).__name__}: {self._state.n_generated} tokens, {reason}>"

    @property
    def tokens(self) -> array[int]:
        """The tokens generated so far."""
        return array("i", self._state.generated_tokens)

    @property
    def finish_reason(self) -> str | None:
        """None while the request runs, then as in Generation."""
        return self._state.finish_reason

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens from the prefix cache."""
        return self._state.cached_tokens

    @property
    def prompt_tokens_read(self) -> int:
        """Tokens of the prompt read so far, besides cached ones."""
        return self._state.prompt_tokens_read

    @property
    def prompt_seconds(self) -> float:
        """Seconds spent on the prompt and the first token."""
        return self._state.prompt_seconds

    @property
    def prompt_memory(self) -> PromptMemory:
        """The memory of the prompt; evictions only at the end."""
        return self.memory_of(self._parts)

    def memory_of(self, parts: PromptParts) -> PromptMemory:
        """Returns prompt_memory for a prompt with these parts of a conversation."""
        return parts.memory(self._state)

    def _next_piece(self) -> str | None:
        """The next piece; None at the end. If closed, waits for the end."""
        piece = self._state.next()
        while self._closed and piece is not None:
            piece = self._state.next()
        return piece

    def close(self) -> None:
        """Cancel the request after the current token or prompt chunk; unread text is lost."""
        self._closed = True
        self._state.cancel()


class Stream(Iterator[str], GenerationHandle):
    """An iterator over pieces of text as they are generated, each valid Unicode.

    Computation starts when the first piece is requested. Streams of one Generator, in one thread or
    in many, are decoded together, each with its own cache. A stream frees its cache when it ends,
    is closed or dropped.

    Errors of the computation, such as MemoryError, are raised while iterating; RuntimeError if the
    Generator was closed.
    """

    def __init__(
        self,
        runtime: Callable[[], Runtime],
        request: Request,
        follows: Stream | None = None,
    ) -> None:
        """`runtime` returns the runtime, or raises RuntimeError after the Generator was closed.

        follows: for Chat: keep the cache of that stream, unless another one has used it since. It
            must have ended, and the prompt must continue its tokens.
        """
        self._runtime = runtime  # keeps the Generator alive
        self._request = request
        self._parts = request.parts
        self._follows: _core.Generation | None = None
        if follows is not None:
            self._follows = follows._state if follows.began else follows._follows
        self._state: _core.Generation = request.submit(runtime().engine, follows=self._follows)

    def __next__(self) -> str:
        try:
            piece = self._next_piece()
        except BaseException:  # KeyboardInterrupt too
            self._state.cancel()
            raise
        if piece is not None:
            return piece
        self._follows = None
        if self.finish_reason == "cancelled":
            self._runtime()  # raises RuntimeError if the Generator was closed
        raise StopIteration

    @property
    def text(self) -> str:
        """The text read so far: all pieces together."""
        return self._state.text_read

    @property
    def finish_message(self) -> str:
        """Returns Generation's."""
        return self._state.finish_message

    @property
    def stop_string(self) -> str:
        """Returns Generation's."""
        return self._state.stop_string

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._state.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Number of tokens generated so far; unlike `tokens`, without a copy."""
        return self._state.n_generated

    @property
    def decode_seconds(self) -> float:
        """Seconds spent on the tokens after the first."""
        return self._state.decode_seconds

    def generation(self) -> Generation:
        """The generation so far; "cancelled" while it runs."""
        return Generation.of(self._state, self._parts)

    @property
    def history(self) -> list[int]:
        """All tokens so far: of the snapshot it continues, the prompt and the output."""
        return self._state.tokens

    @property
    def began(self) -> bool:
        """Whether reading the prompt has begun."""
        return self._state.began

    @property
    def request(self) -> Request:
        """The request."""
        return self._request

    def save(self, path: str | os.PathLike[str] | None = None, *, note: Any = None) -> Snapshot:
        """A snapshot of the text so far, also written to `path`; the stream can continue.

        note: any value that JSON can hold; Snapshot.note returns it.

        Raises RuntimeError if nothing has been read yet, or if the stream has ended and another one
        has used its cache since; OSError if the file cannot be written.
        """
        self._runtime()
        return Snapshot.take(self._state, path, note)

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens read per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens decoded per second, without the first one, which is part of the prompt's time."""
        n = self._state.n_generated
        return (n - 1) / self.decode_seconds if self.decode_seconds else 0.0
