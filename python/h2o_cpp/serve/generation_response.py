"""Responses of all APIs with generated text, complete or streamed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import Response
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from h2o_cpp.serve.errors import Api, ApiError, internal_error
from h2o_cpp.serve.outputs import Output, Outputs

# Describes streams of server-sent events in the OpenAPI document.
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "All at once, or a stream of chunks",
        "content": {"text/event-stream": {}},
    }
}

Pieces = AsyncIterator[tuple[Output, str]]


class OutputsResponse(Response, ABC):
    """A response that is sent when all outputs have ended.

    When the response ends or the client disconnects, unfinished outputs are cancelled.

    Attributes: `on_end`, called at the end.
    """

    def __init__(self, outputs: Outputs) -> None:
        super().__init__()
        self._outputs = outputs
        self.on_end: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. The request's body must have been read."""
        client = asyncio.ensure_future(self._until_disconnect(receive))
        try:
            async with aclosing(self._outputs.pieces()) as pieces:
                # In a task of its own, so that each piece resumes this and not all middleware.
                await asyncio.ensure_future(self._answer(pieces, scope, receive, send))
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
        """The complete response, after all outputs have ended."""

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
    """A response that is complete or streamed.

    The status is sent with the first piece, so earlier errors have their own status. A later error
    is the last event of the stream.
    """

    api: Api = "OpenAI"  # decides the form of errors
    stream_type = "text/event-stream; charset=utf-8"

    def __init__(self, outputs: list[Output], *, stream: bool) -> None:
        super().__init__(Outputs(outputs))
        self._stream = stream

    def begin(self) -> bytes:
        """The first bytes of a stream."""
        return b""

    @abstractmethod
    def event(self, output: Output, piece: str) -> bytes:
        """The bytes for a piece of an output; may be empty."""

    def end(self) -> bytes:
        """The last bytes of a stream."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """The last bytes of a stream that failed."""
        return error_event(error, self.api)

    async def _answer(self, pieces: Pieces, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._stream:
            return await super()._answer(pieces, scope, receive, send)
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


def sse(data: str, event: str | None = None) -> bytes:
    """A server-sent event."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {data}\n\n".encode()


def error_event(error: ApiError, api: Api) -> bytes:
    """The last bytes of a stream that failed."""
    if api == "Ollama":
        return error.body(api).encode() + b"\n"
    return sse(error.body(api), "error" if api == "Anthropic" else None)
