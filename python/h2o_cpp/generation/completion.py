"""Completions: texts that an Engine's thread writes, and others read as they come."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator
from concurrent.futures import Future
from typing import Any

from h2o_cpp.generation.closing import Closing
from h2o_cpp.generation.continuation import Continuation, Generation
from h2o_cpp.generation.request import Request


class Channel:
    """Pieces on their way from the engine's thread to whoever reads them."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.continuation: Continuation | None = None  # once it has a sequence
        self.cancelled = False  # wanted no more; the engine looks before each step
        self.finish_reason: str | None = None
        self.n_read = 0  # tokens of the pieces that have been read
        self._mutex = threading.Lock()
        self._pieces: deque[tuple[str, int]] = deque()  # each with how many tokens there were
        self._error: Exception | None = None
        self._readers: list[Future[None]] = []  # who wait for the next piece

    def put(self, piece: str, n_tokens: int) -> None:
        """Another piece, which the first `n_tokens` tokens have completed."""
        with self._mutex:
            self._pieces.append((piece, n_tokens))
            readers, self._readers = self._readers, []
        _wake(readers)

    def end(self, reason: str, error: Exception | None = None) -> None:
        """There are no more; an error is raised where they are read."""
        with self._mutex:
            if self.finish_reason is not None:
                return
            self.finish_reason, self._error = reason, error
            readers, self._readers = self._readers, []
        _wake(readers)

    def get(self) -> str | Future[None] | None:
        """The next piece; None after the last; or what to wait for before asking again."""
        with self._mutex:
            if self._pieces and not self.cancelled:
                piece, self.n_read = self._pieces.popleft()
                return piece
            if self.finish_reason is not None:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                if self.continuation is not None:
                    self.n_read = len(self.continuation.tokens)
                return None
            reader: Future[None] = Future()
            self._readers.append(reader)
            return reader

    def generation(self) -> Generation:
        """What it amounted to."""
        if self.continuation is not None:
            return self.continuation.generation()
        return Generation("", "cancelled", "", 0, 0, 0.0, 0.0)


class Completion(Iterator[str], AsyncIterator[str], Closing):
    """The text that an Engine makes of a request: iterate over it for pieces, each valid Unicode.

    In a thread: `for piece in completion`, or `completion.result()` for the whole. In a task:
    `async for piece in completion`, or `await completion`.

    The text is written whether it is read or not. Closing or dropping the Completion, and
    interrupting or cancelling who waits for a piece, cancels it: its sequence is free for another
    request at the next step. What is wrong with a request is raised where its pieces are read.
    """

    def __init__(self, engine: object, channel: Channel) -> None:
        """`engine` is kept alive."""
        self._engine = engine
        self._channel = channel

    def __repr__(self) -> str:
        return f"<Completion: {len(self.tokens)} tokens, {self.finish_reason or 'not ended'}>"

    @property
    def finish_reason(self) -> str | None:
        """None until it has ended, then as in Generation."""
        return self._channel.finish_reason

    @property
    def tokens(self) -> array[int]:
        """The ids generated so far."""
        continuation = self._channel.continuation
        return array("i") if continuation is None else continuation.tokens[:]

    @property
    def n_read(self) -> int:
        """How many tokens the pieces that have been read are made of; all of them, at the end."""
        return self._channel.n_read

    def result(self) -> Generation:
        """Wait until it has ended; what it amounted to, pieces that were read before included."""
        for _ in self:
            pass
        return self._channel.generation()

    def close(self) -> None:
        """Cancel it, unless it has ended. What has not been read is lost."""
        self._channel.cancelled = True

    def __iter__(self) -> Completion:
        return self

    def __next__(self) -> str:
        try:
            while isinstance(piece := self._channel.get(), Future):
                piece.result()
        except BaseException:  # KeyboardInterrupt too
            self.close()
            raise
        if piece is None:
            raise StopIteration
        return piece

    def __aiter__(self) -> Completion:
        return self

    async def __anext__(self) -> str:
        # Whoever awaits has loaded it; others are spared the time that it takes.
        from asyncio import wrap_future

        try:
            while isinstance(piece := self._channel.get(), Future):
                await wrap_future(piece)
        except BaseException:  # CancelledError too
            self.close()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def __await__(self) -> Generator[Any, None, Generation]:
        return self._whole().__await__()

    async def _whole(self) -> Generation:
        async for _ in self:
            pass
        return self._channel.generation()

    def __del__(self) -> None:
        if hasattr(self, "_channel"):  # __init__ got that far
            self._channel.cancelled = True  # a lock might be held by the thread that this is in


def _wake(readers: list[Future[None]]) -> None:
    for reader in readers:
        if reader.set_running_or_notify_cancel():
            reader.set_result(None)
