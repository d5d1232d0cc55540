"""Server-sent events, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.texts import ServedTexts

T = TypeVar("T")


# What a stream is in the OpenAPI document, beside the complete response.
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "All at once, or a stream of chunks",
        "content": {"text/event-stream": {}},
    }
}


async def unless_client_leaves(request: Request, answer: Awaitable[T]) -> T:
    """Await `answer`; if the client disconnects meanwhile, cancel it and raise ApiError.

    The request's body must have been read.
    """
    left = asyncio.ensure_future(_disconnected(request))
    task = asyncio.ensure_future(answer)
    try:
        await asyncio.wait({left, task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has left")
        return task.result()
    finally:
        left.cancel()
        task.cancel()


class EventStream(StreamingResponse):
    """Chunks as server-sent events, the last of which is [DONE]; what goes wrong is an event, too.

    However it ends, the sequences end too.
    """

    media_type = "text/event-stream"

    def __init__(self, texts: ServedTexts, chunks: AsyncIterator[BaseModel]) -> None:
        super().__init__(_events(chunks), headers={"Cache-Control": "no-store"})
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._texts.close()


async def _events(chunks: AsyncIterator[BaseModel]) -> AsyncIterator[str]:
    try:
        async for chunk in chunks:
            yield f"data: {chunk.model_dump_json()}\n\n"
    except ApiError as error:
        yield f"data: {error.body()}\n\n"
    else:
        yield "data: [DONE]\n\n"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
