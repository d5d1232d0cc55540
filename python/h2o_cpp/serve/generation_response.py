"""Responses of all APIs with generated text, complete or streamed."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from h2o_cpp.files.visible_text import visible_log
from h2o_cpp.serve.errors import Api, ApiError, internal_error
from h2o_cpp.serve.outputs import Output, Outputs

# Describes streams of server-sent events in the OpenAPI document.
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "All at once, or a stream of chunks",
        "content": {"text/event-stream": {}},
    }
}

_log = visible_log("uvicorn.error")  # the server's log

_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}

_PINGS = re.compile(
    rb'(?:: ping\n\n|event: ping\ndata: \{"type": "ping"\}\n\n|'
    rb'data: \{[^\n]*"choices":\[\],"prompt_progress":\{[^\n{}]*\}\}\n\n|'
    rb'\{[^\n]*"done":false,(?:"message":\{"role":"assistant","content":""\}|"response":"")\}\n)*'
)

Pieces = AsyncIterator[tuple[Output, str]]

_PING_SECONDS = 2.0  # proxies and clients close connections that are silent for longer
_FIRST_SECONDS = 0.1  # in which the error of a request that does not wait has its own status


class OutputsResponse(Response, ABC):
    """A response that is sent when all outputs have ended.

    When the response ends or the client disconnects, unfinished outputs are cancelled.

    Attributes: `on_end`, called with the outputs at the end.
    """

    def __init__(self, outputs: Outputs) -> None:
        super().__init__()
        self._outputs = outputs
        self.on_end: Callable[[Sequence[Output]], None] = lambda outputs: None

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
            self.on_end(self._outputs.all)

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

    A stream begins with the first piece, or soon without one, and then pings while there is nothing
    else to send. An earlier error has its own status, a later one is the last event.
    """

    api: Api = "OpenAI"  # decides the form of errors
    stream_type = "text/event-stream; charset=utf-8"

    def __init__(self, outputs: list[Output], *, stream: bool) -> None:
        super().__init__(Outputs(outputs))
        self._stream = stream
        self._begun = False  # whether the headers of a stream were sent
        self._silent = True  # whether nothing was sent since the last ping

    def begin(self) -> bytes:
        """The first bytes of a stream."""
        return b""

    @abstractmethod
    def event(self, output: Output, piece: str) -> bytes:
        """The bytes for a piece of an output; may be empty."""

    def end(self) -> bytes:
        """The last bytes of a stream."""
        return b""

    def ping(self) -> bytes:
        """The bytes that only show that the server is there."""
        return b": ping\n\n"

    def failed(self, error: ApiError) -> bytes:
        """The last bytes of a stream that failed."""
        return error_event(error, self.api)

    async def _answer(self, pieces: Pieces, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._stream:
            return await super()._answer(pieces, scope, receive, send)
        # A timer first, then a task, because many streams are short.
        loop = asyncio.get_running_loop()
        self._pings: asyncio.TimerHandle | asyncio.Task[None]
        self._pings = loop.call_later(_FIRST_SECONDS, self._start_pings, send)
        try:
            output, piece = await anext(pieces)
            event = self.begin()
            while not self._outputs.ended:
                event += self.event(output, piece)
                if event:
                    await self._send(send, event)
                event = b""
                output, piece = await anext(pieces)
            event += self.event(output, piece) + self.end()
            self._pings.cancel()
            await self._send(send, event, more=False)
        except Exception as error:
            if not self._begun:
                raise
            self._pings.cancel()
            shown = error if isinstance(error, ApiError) else internal_error()
            await self._send(send, self.failed(shown), more=False)
            if shown is not error:
                raise
        finally:
            self._pings.cancel()
            del self._pings  # the task refers to this response

    def _start_pings(self, send: Send) -> None:
        self._pings = asyncio.ensure_future(self._send_pings(send))
        self._pings.add_done_callback(_log_failure)

    async def _send_pings(self, send: Send) -> None:
        await self._begin(send)
        while True:
            await asyncio.sleep(_PING_SECONDS)
            if self._silent:
                await self._send(send, self.ping())
            self._silent = True

    async def _begin(self, send: Send) -> None:
        if not self._begun:
            self._begun = True
            headers = [
                (b"content-type", self.stream_type.encode()),
                (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no"),  # nginx passes pieces on as they come
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send(self, send: Send, event: bytes, *, more: bool = True) -> None:
        await self._begin(send)
        self._silent = False
        await send({"type": "http.response.body", "body": event, "more_body": more})


def _log_failure(pings: asyncio.Task[None]) -> None:
    if not pings.cancelled() and (error := pings.exception()) is not None:
        _log.error("a stream goes on without pings", exc_info=error)


def sse(data: str, event: str | None = None) -> bytes:
    """A server-sent event; data: JSON."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {_one_line(data)}\n\n".encode()


def json_line(data: str) -> bytes:
    """A line of JSON."""
    return f"{_one_line(data)}\n".encode()


def _one_line(data: str) -> str:
    """JSON with escapes for what some clients take for the end of a line."""
    return data if data.isascii() else data.translate(_LINE_ENDS)


def are_pings(body: bytes) -> bool:
    """Whether a part of a stream of any API only shows that the server is there."""
    return _PINGS.fullmatch(body) is not None


def error_event(error: ApiError, api: Api) -> bytes:
    """The last bytes of a stream that failed."""
    if api == "Ollama":
        return json_line(error.body(api))
    return sse(error.body(api), "error" if api == "Anthropic" else None)
