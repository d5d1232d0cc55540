"""A limit to the size of requests."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2o_cpp.serve.errors import ApiError


class BodyLimit:
    """ASGI middleware that reads no more of a body than n_bytes: the answer is then 413."""

    def __init__(self, app: ASGIApp, n_bytes: int) -> None:
        self._app = app
        self._n_bytes = n_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"the body has more than {self._n_bytes} bytes"
        if int(Headers(scope=scope).get("content-length", 0)) > self._n_bytes:
            await ApiError(413, message).response()(scope, receive, send)
            return
        n_read = 0

        async def limited() -> Message:
            nonlocal n_read
            part = await receive()
            n_read += len(part.get("body", b""))
            if n_read > self._n_bytes:
                raise HTTPException(413, message)
            return part

        await self._app(scope, limited, send)
