"""Responses with generated text, of every dialect: complete, or as a stream."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from fastapi import Response
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from h2o_cpp.serve.errors import ApiError, internal_error
from h2o_cpp.serve.outputs import Output, Outputs

Pieces = AsyncIterator[tuple[Output, str]]


class OutputsResponse(Response, ABC):
    """The response to a request whose outputs have been submitted, sent when all have ended.

    However it ends, so do its outputs, and they end at once when the client disconnects.

    Attributes: `on_end`, called when it has ended.
    """

    def __init__(self, outputs: list[Output]) -> None:
        super().__init__()
        self._outputs = Outputs(outputs)
        self.on_end: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. The request's body must have been read."""
        client = asyncio.ensure_future(self._until_disconnect(receive))
        try:
            async with aclosing(self._outputs.pieces()) as pieces:
                await self._answer(pieces, scope, receive, send)
        except ApiError:
            if client.done():
                raise ApiError(499, "the client has left") from None
            raise
        finally:
            client.cancel()
            self._outputs.close()
            self.on_end()

    @abstractmethod
    def complete(self, outputs: list[Output]) -> BaseModel:
        """All of it, when all outputs have ended."""

    async def _answer(self, pieces: Pieces, scope: Scope, receive: Receive, send: Send) -> None:
        async for _ in pieces:
            pass
        complete = self.complete(self._outputs.all).model_dump_json()
        await Response(complete, media_type="application/json")(scope, receive, send)

    async def _until_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._outputs.close()


class GenerationResponse(OutputsResponse):
    """One that can be a stream.

    The status is sent when the first piece is there, so what is wrong until then has a status of
    its own. What goes wrong later in a stream is its last event.
    """

    stream_type = "text/event-stream; charset=utf-8"

    def __init__(self, outputs: list[Output], *, stream: bool) -> None:
        super().__init__(outputs)
        self._stream = stream

    def begin(self) -> bytes:
        """What a stream begins with."""
        return b""

    @abstractmethod
    def event(self, output: Output, piece: str) -> bytes:
        """A piece of an output, and what else is new of it; perhaps nothing."""

    @abstractmethod
    def end(self) -> bytes:
        """What a stream ends with, when all outputs have ended."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """What a stream ends with that went wrong."""

    async def _answer(self, pieces: Pieces, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream:
            await self._send_stream(pieces, send)
        else:
            await super()._answer(pieces, scope, receive, send)

    async def _send_stream(self, pieces: Pieces, send: Send) -> None:
        output, piece = await anext(pieces)
        headers = [(b"content-type", self.stream_type.encode()), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            event = self.begin()
            while not self._outputs.ended:
                event += self.event(output, piece)
                if event:
                    await send(_part(event))
                event = b""
                output, piece = await anext(pieces)
            event += self.event(output, piece) + self.end()
            await send(_part(event, more=False))
        except Exception as error:
            shown = error if isinstance(error, ApiError) else internal_error()
            await send(_part(self.failed(shown), more=False))
            if shown is not error:
                raise


def _part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def sse(data: bytes, event: str | None = None) -> bytes:
    """A server-sent event."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + data + b"\n\n"
