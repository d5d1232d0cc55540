"""HTTP/1.1 on one connection: how long a client may take, and how many there may be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from h2o_cpp.serve.errors import ApiError

_LINGER_SECONDS = 1.0  # for clients that are turned away
_READ_BYTES = 32 * 2**10  # at once, instead of 256 KiB: many connections hold several times that
_MAX_REFUSED = 64  # of whom, beyond which connections are cut


class Connections:
    """What all connections of a server share.

    Attributes: `most`, of them at once; `head_seconds`, in which a request's headers must arrive;
    `write_seconds`, in which a client must take something of what is sent to it; `receiving`, those
    of which a request has not arrived in full, in the order in which they began to wait for one;
    `refused`, those that were too many.
    """

    def __init__(self, *, most: int, head_seconds: int, write_seconds: int) -> None:
        self.most = most
        self.head_seconds, self.write_seconds = head_seconds, write_seconds
        self.receiving: dict[Connection, None] = {}
        self.refused: set[Connection] = set()


class Connection(H11Protocol):
    """Uvicorn's protocol, within the limits of Connections.

    At the limit of connections, one that has not sent its request yet is closed for the next one,
    so that idle connections do not block others.
    """

    def __init__(self, *args: Any, all_of_them: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._all = all_of_them
        self._head_timer, self._write_timer = _Timer(self.loop), _Timer(self.loop)
        self._silent = True  # nothing has come
        self._is_away = False  # it has been answered, and what still comes is dropped

    def connection_made(self, transport: Any) -> None:
        """Take it, if there is room."""
        super().connection_made(transport)
        with suppress(AttributeError):  # of an event loop other than asyncio's
            transport.max_size = _READ_BYTES
        if len(self.connections) > self._all.most:
            longest = next(iter(self._all.receiving), None)
            if longest is None:
                return self._refuse()
            longest.end(ApiError(503, "there are too many connections", code="too_many"))
        self._follow()
        self._time_head()

    def data_received(self, data: bytes) -> None:
        """Of a request."""
        if self._is_away:
            return
        self._silent = False
        super().data_received(data)
        self._follow()
        self._time_head()

    def send_400_response(self, msg: str) -> None:
        """Of what is not HTTP, or has longer headers than h11 takes."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._turn_away(ApiError(400, msg))
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """It waits for the next request."""
        super().on_response_complete()
        self._follow()
        if self.transport.get_write_buffer_size():
            self._time_write()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        super().pause_writing()
        self._time_write()

    def resume_writing(self) -> None:
        """It has taken what there was."""
        super().resume_writing()
        self._write_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left of it."""
        super().connection_lost(exc)
        self._all.receiving.pop(self, None)
        self._all.refused.discard(self)
        self._head_timer.stop()
        self._write_timer.stop()

    def end(self, why: ApiError) -> None:
        """Close it, and say why if a request had begun."""
        self._all.receiving.pop(self, None)
        if not self._silent and self.conn.our_state is h11.IDLE:
            self._answer(why)
        self.transport.close()

    def _refuse(self) -> None:
        self.connections.discard(self)
        if len(self._all.refused) >= _MAX_REFUSED:
            return self.transport.abort()
        self._all.refused.add(self)
        most = self._all.most
        message = f"there are {most} connections, the most here"
        self._turn_away(ApiError(503, message, code="too_many"))

    def _turn_away(self, error: ApiError) -> None:
        """Answer, and close a moment later, so that the client gets to read it."""
        self._is_away = True
        self._answer(error)
        if self.transport.can_write_eof():  # not over TLS
            self.transport.write_eof()
        self._write_timer.start(_LINGER_SECONDS, self.transport.abort)

    def _answer(self, error: ApiError) -> None:
        response = error.response({"Connection": "close"})
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body))

    def _follow(self) -> None:
        """Keep the list of those that have not sent their request."""
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._all.receiving.setdefault(self)
        else:
            self._all.receiving.pop(self, None)

    def _time_head(self) -> None:
        """The time runs from the first byte on, of a first request from the connection on.

        A request whose response is complete counts as none, although its body may go on. The body
        of one that is in progress has a time of its own (`bodies`).
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_timer.stop()
        else:
            self._head_timer.start(self._all.head_seconds, self._end_late)

    def _end_late(self) -> None:
        seconds = self._all.head_seconds
        self.end(ApiError(408, f"the headers did not arrive within {seconds} s", code="timeout"))

    def _time_write(self) -> None:
        self._write_timer.start(self._all.write_seconds, self._check_write)

    def _check_write(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()


class _Timer:
    """Calls a function some seconds after start(), unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, call: Callable[[], None]) -> None:
        """Nothing is changed if it runs already."""
        if self._handle is None:
            self._handle = self._loop.call_later(seconds, self._end, call)

    def stop(self) -> None:
        """It can be started again."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _end(self, call: Callable[[], None]) -> None:
        self._handle = None
        call()
