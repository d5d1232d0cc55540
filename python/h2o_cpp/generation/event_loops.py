"""asyncio support. Imported only when needed, as importing asyncio is slow."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from weakref import WeakKeyDictionary

from h2o_cpp import _core

_POLL_SECONDS = 0.005  # if an event loop cannot watch sockets

# Readers use the loop's time, and perhaps a core of the computing thread. After a slow round of
# readers, the next round is delayed by the same time, within bounds, and gets larger pieces.
_QUICK_SECONDS = 0.001
_REST_SECONDS = 0.01  # maximum


class EventLoops:
    """The event loops that wait for generations of an engine."""

    def __init__(self) -> None:
        self._watches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = WeakKeyDictionary()

    async def let_others_run(self) -> None:
        """Let the other tasks of the loop run once."""
        await asyncio.sleep(0)

    async def wait(self, state: _core.Generation) -> None:
        """Wait for a possible change of a generation: a piece, its admission or its end."""
        state.check_may_wait()
        loop = asyncio.get_running_loop()
        watch = self._watches.get(loop)
        if watch is None:
            watch = self._watches[loop] = _Watch()
        await watch.wait(loop, state)


class _Watch:
    """The generations that one event loop waits for.

    The computing thread signals changes through a socket, so that it never needs the GIL.
    """

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._there.setblocking(False)
        self._mailbox = _core.Mailbox(self._there.fileno())
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self._watches = False  # whether the socket is watched
        self._timer: asyncio.TimerHandle | None = None  # if sockets cannot be watched
        self._rests = False

    async def wait(self, loop: asyncio.AbstractEventLoop, state: _core.Generation) -> None:
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.setdefault(state.key, []).append(waiter)
        self._watch(loop)
        state.subscribe(self._mailbox)
        try:
            await waiter
        finally:
            waiters = self._waiters.get(state.key, [])
            if waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[state.key]
            self._watch(loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the socket while there are waiters, except during a delay."""
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
            for waiter in self._waiters.pop(key, ()):
                if not waiter.done():
                    waiter.set_result(None)
        loop.call_soon(self._rest, loop, begin)  # after the readers

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
        if hasattr(self, "_mailbox"):
            self._mailbox.close()  # another socket may get the number of this one
            self._here.close()
            self._there.close()
