"""Event loops that wait for generations. Imported when one does: asyncio takes long to import."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from weakref import WeakKeyDictionary

from h2o_cpp import _core

_POLL_SECONDS = 0.005  # where an event loop cannot watch a socket

# Readers take the loop's time, and perhaps a core from the thread that computes. After a round of
# them that was not quick, the next one waits as long, within bounds, and finds larger pieces.
_QUICK_SECONDS = 0.001
_REST_SECONDS = 0.01  # at most


class EventLoops:
    """The event loops that wait for generations of one engine."""

    def __init__(self) -> None:
        self._watches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = WeakKeyDictionary()

    async def let_others_run(self) -> None:
        """Lets the other tasks of the loop run once."""
        await asyncio.sleep(0)

    async def wait(self, state: _core.Generation) -> None:
        """Until there may be news of a generation: a piece, its admission or its end."""
        state.check_may_wait()
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
