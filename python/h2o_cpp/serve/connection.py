"""HTTP/1.1 connections with timeouts and a maximum number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from h2o_cpp.serve.errors import LINGER_SECONDS, ApiError
from h2o_cpp.serve.log import id_of

_READ_BYTES = 32 * 2**10  # instead of 256 KiB, of which many connections hold several
_MAX_REFUSED = 64  # rejected connections that may wait; further ones are aborted


@dataclass
class Connections:
    """State shared by all connections of a server."""

    maximum: int
    head_seconds: int  # for a request's headers
    write_seconds: int  # in which a client must read something
    # Those without a complete request, longest waiting first.
    receiving: dict[Connection, None] = field(default_factory=dict)
    refused: set[Connection] = field(default_factory=set)  # over the maximum


class Connection(H11Protocol):
    """Uvicorn's protocol with the limits of Connections.

    At the maximum, the connection that has waited longest for a request is closed in favor of a
    new one, so that idle connections block nobody.
    """

    def __init__(self, *args: Any, shared: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shared = shared
        self._head_timer, self._write_timer = _Timer(self.loop), _Timer(self.loop)
        self._silent = True  # nothing was received
        self._is_away = False  # answered; further data is discarded

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        with suppress(AttributeError):  # an event loop other than asyncio's
            transport.max_size = _READ_BYTES
        if len(self.connections) > self._shared.maximum:
            longest = next(iter(self._shared.receiving), None)
            if longest is None:
                return self._refuse()
            longest.end(ApiError(503, "there are too many connections", code="too_many"))
        self._follow()
        self._time_head()

    def data_received(self, data: bytes) -> None:
        if self._is_away:
            return
        self._silent = False
        super().data_received(data)
        self._follow()
        self._time_head()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._turn_away(ApiError(400, msg))
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()
        if self.conn.trailing_data[0]:  # a part of the next request
            self._time_head()
        if self.transport.get_write_buffer_size():
            self._time_write()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._time_write()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._shared.receiving.pop(self, None)
        self._shared.refused.discard(self)
        self._unset_keepalive_if_required()  # or its timer keeps this object until then
        self._head_timer.stop()
        self._write_timer.stop()

    def end(self, why: ApiError) -> None:
        """Close the connection, with an error response if a request had begun."""
        self._shared.receiving.pop(self, None)
        if not self._silent and self.conn.our_state is h11.IDLE:
            self._answer(why)
        self.transport.close()

    def _refuse(self) -> None:
        self.connections.discard(self)
        if len(self._shared.refused) >= _MAX_REFUSED:
            return self.transport.abort()
        self._shared.refused.add(self)
        message = f"there are {self._shared.maximum} connections, the limit"
        self._turn_away(ApiError(503, message, code="too_many"))

    def _turn_away(self, error: ApiError) -> None:
        """Send an error, then close after a delay so that the client can read it."""
        self._is_away = True
        self._answer(error)
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self._write_timer.start(LINGER_SECONDS, self.transport.abort)

    def _answer(self, error: ApiError) -> None:
        response = error.response({"Connection": "close", "X-Request-Id": id_of(())})
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body))

    def _follow(self) -> None:
        """Update the list of connections without a complete request."""
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._shared.receiving.setdefault(self)
        else:
            self._shared.receiving.pop(self, None)

    def _time_head(self) -> None:
        """Start or stop the timeout of a request's headers.

        It runs from the first byte of a request, for the first request from the connection on. The
        body has a timeout of its own (`bodies`). A request whose response is complete counts as
        finished, even if its body continues.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_timer.stop()
        else:
            self._head_timer.start(self._shared.head_seconds, self._end_late)

    def _end_late(self) -> None:
        seconds = self._shared.head_seconds
        self.end(ApiError(408, f"the headers did not arrive within {seconds} s", code="timeout"))

    def _time_write(self) -> None:
        self._write_timer.start(self._shared.write_seconds, self._check_write)

    def _check_write(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()


class _Timer:
    """Calls a function after some seconds unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, call: Callable[[], None]) -> None:
        """Start it, unless it is running."""
        if self._handle is None:
            self._handle = self._loop.call_later(seconds, self._end, call)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _end(self, call: Callable[[], None]) -> None:
        self._handle = None
        call()
