"""Middleware that reads request bodies completely, within limits on size and time."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2o_cpp.serve.errors import ApiError, refuse

_SMALL_BYTES = 64 * 2**10  # smaller bodies never count towards the total, which connections limit

_PATHS = (  # with a body
    *("/v1/", "/api/", "/tokenize", "/detokenize", "/apply-template"),
    *("/completion", "/infill"),
)


@dataclass
class BodyLimits:
    """Limits on the size of request bodies and on the time to receive them."""

    each: int  # most bytes of one body
    total: int  # of all requests in progress
    seconds: int  # within which a body must arrive
    n_bytes: int = 0  # held now


class Bodies:
    """ASGI middleware that reads the body before it calls the application."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_PATHS):
            return await self._app(scope, receive, send)
        body, seconds = _Body(self._limits), self._limits.seconds
        try:
            try:
                with anyio.fail_after(seconds):
                    await body.read(scope, receive)
            except ApiError as error:
                return await refuse(error, scope, receive, send)
            except TimeoutError:
                late = ApiError(408, f"the body did not arrive within {seconds} s", code="timeout")
                return await refuse(late, scope, receive, send)
            await self._app(scope, body.receive_again(receive), send)
        finally:
            body.release()


class _Body:
    """One body; its bytes count until release()."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._data = bytearray()
        self._n_bytes = 0

    async def read(self, scope: Scope, receive: Receive) -> None:
        headers = dict(scope["headers"])
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.lower() not in ("", "identity"):
            shown = f"the body's Content-Encoding is {encoding!r}, expected none"
            raise ApiError(415, shown, code="unsupported_encoding")
        self._check(int(headers.get(b"content-length", b"0")))
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(499, "the client has left")
            part, more = message.get("body", b""), message.get("more_body", False)
            self._check(self._n_bytes + len(part))
            self._data += part
            self._n_bytes += len(part)
            self._limits.n_bytes += len(part)

    def receive_again(self, receive: Receive) -> Receive:
        """A receive() that returns the body first, then further messages."""
        given = False

        async def receive_body() -> Message:
            nonlocal given
            if given:
                return await receive()
            given, body = True, bytes(self._data)
            self._data = bytearray()
            return {"type": "http.request", "body": body, "more_body": False}

        return receive_body

    def release(self) -> None:
        self._limits.n_bytes -= self._n_bytes
        self._n_bytes, self._data = 0, bytearray()

    def _check(self, n_bytes: int) -> None:
        limits = self._limits
        if n_bytes > limits.each:
            message = f"the body has more than {limits.each} bytes"
            raise ApiError(413, message, code="body_too_large")
        others = limits.n_bytes - self._n_bytes
        if n_bytes > _SMALL_BYTES and others + n_bytes > limits.total:
            message = f"requests in progress hold {others} bytes, the limit is {limits.total}"
            raise ApiError(503, f"{message}; try again later", code="too_many_bytes")
