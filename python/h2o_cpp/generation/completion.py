"""Completions: generations that an Engine computes, read by threads or by asyncio tasks."""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from h2o_cpp import _core
from h2o_cpp.generation.closing import Closing
from h2o_cpp.generation.stream import Generation

_POLL_SECONDS = 0.005  # where an event loop cannot watch a socket

# Readers take the loop's time, and perhaps a core from the thread that computes. After a round of
# them that was not quick, the next one waits as long, within bounds, and finds larger pieces.
_QUICK_SECONDS = 0.001
_REST_SECONDS = 0.01  # at most


class EventLoops:
    """The event loops that wait for generations of one engine."""

    def __init__(self) -> None:
        self._watches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = WeakKeyDictionary()

    async def wait(self, state: _core.Generation) -> None:
        """Until there may be news of a generation: a piece, its admission or its end."""
        loop = asyncio.get_running_loop()
        watch = self._watches.get(loop)
        if watch is None:
            watch = self._watches[loop] = _Watch()
        await watch.wait(loop, state)


class _Watch:
    """What one event loop waits for. The thread that computes writes to a socket when there is
    news, so it never needs Python's lock."""

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._there.setblocking(False)
        self._mailbox = _core.Mailbox(self._there.fileno())
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._watches = False  # the socket
        self._timer: asyncio.TimerHandle | None = None  # where it cannot
        self._rests = False

    async def wait(self, loop: asyncio.AbstractEventLoop, state: _core.Generation) -> None:
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters[state.key] = waiter
        self._watch(loop)
        state.subscribe(self._mailbox)
        try:
            await waiter
        finally:
            if self._waiters.get(state.key) is waiter:
                del self._waiters[state.key]
            self._watch(loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listen to the socket exactly while somebody waits and this does not rest."""
        wanted = bool(self._waiters) and not self._rests
        if wanted == self._watches:
            return
        self._watches = wanted
        try:
            if wanted:
                loop.add_reader(self._here, self._deliver, loop)
            else:
                loop.remove_reader(self._here)
        except NotImplementedError:
            if wanted:
                self._timer = loop.call_later(_POLL_SECONDS, self._poll, loop)
            elif self._timer is not None:
                self._timer.cancel()

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(_POLL_SECONDS, self._poll, loop)
        self._deliver(loop)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        begin = loop.time()
        with suppress(BlockingIOError):
            self._here.recv(4096)
        for key in self._mailbox.take():
            waiter = self._waiters.pop(key, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        loop.call_soon(self._rest, loop, begin)  # when those have read

    def _rest(self, loop: asyncio.AbstractEventLoop, begin: float) -> None:
        seconds = loop.time() - begin
        if seconds < _QUICK_SECONDS or self._rests:
            return
        self._rests = True
        self._watch(loop)
        loop.call_later(min(seconds, _REST_SECONDS), self._resume, loop)

    def _resume(self, loop: asyncio.AbstractEventLoop) -> None:
        self._rests = False
        self._watch(loop)

    def __del__(self) -> None:
        if hasattr(self, "_there"):
            self._here.close()
            self._there.close()


class Completion(Iterator[str], AsyncIterator[str], Closing):
    """The text that an Engine makes of a request: iterate over it for pieces, each valid Unicode.

    In a thread: `for piece in completion`, or `completion.result()` for the whole. In a task:
    `async for piece in completion`, or `await completion`. A reader that is slower than the engine
    gets several tokens' text in one piece.

    The text is written whether it is read or not. Closing or dropping the Completion, and
    interrupting or cancelling a wait for a piece, cancels it: its sequence is free for another
    request at the next step. What is wrong with a request is raised where its pieces are read.
    """

    def __init__(self, engine: object, state: _core.Generation, loops: EventLoops) -> None:
        """`engine` is kept alive."""
        self._engine = engine
        self._state = state
        self._loops = loops
        self._closed = False
        self._was_ready = False  # whether a task found the last piece without waiting for it

    def __repr__(self) -> str:
        return (
            f"<Completion: {self._state.n_generated} tokens, {self.finish_reason or 'not ended'}>"
        )

    @property
    def finish_reason(self) -> str | None:
        """None until it has ended, then as in Generation."""
        return self._state.finish_reason

    @property
    def tokens(self) -> array[int]:
        """The ids generated so far."""
        return array("i", self._state.generated_tokens)

    @property
    def n_read(self) -> int:
        """How many tokens the pieces that have been read are made of; all of them, at the end."""
        return self._state.n_tokens_read

    def result(self) -> Generation:
        """Wait until it has ended; what it amounted to, pieces that were read before included."""
        for _ in self:
            pass
        return Generation.of(self._state)

    def close(self) -> None:
        """Cancel it, unless it has ended. What has not been read is lost."""
        self._closed = True
        self._state.cancel()

    def __iter__(self) -> Completion:
        return self

    def __next__(self) -> str:
        try:
            piece = self._state.next()
            while self._closed and piece is not None:  # until the engine has ended it, too
                piece = self._state.next()
        except BaseException:  # KeyboardInterrupt too
            self.close()
            raise
        if piece is None:
            raise StopIteration
        return piece

    def __aiter__(self) -> Completion:
        return self

    async def __anext__(self) -> str:
        try:
            if self._was_ready:  # an engine that is faster than its reader must not block the loop
                await asyncio.sleep(0)
            self._was_ready = True
            while True:
                ended = self.finish_reason is not None
                piece = self._state.poll()
                if piece is not None and not self._closed:
                    return piece
                if ended:
                    break
                self._was_ready = False
                await self._loops.wait(self._state)
        except BaseException:  # CancelledError too
            self.close()
            raise
        raise StopAsyncIteration

    def __await__(self) -> Generator[Any, None, Generation]:
        return self._whole().__await__()

    async def _whole(self) -> Generation:
        async for _ in self:
            pass
        return Generation.of(self._state)

    def __del__(self) -> None:
        if hasattr(self, "_closed"):  # __init__ got that far
            self._state.cancel()
