"""Responses with generated text: complete, or streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import Response
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from h2o_cpp.serve.cache_view import CacheView
from h2o_cpp.serve.errors import ApiError, internal_error
from h2o_cpp.serve.outputs import Output, Outputs
from h2o_cpp.serve.requests import GenerationRequest
from h2o_cpp.serve.responses import KeptTokens, PromptTokensDetails, ResponseHead, Usage
from h2o_cpp.serve.service import Service

# What a stream is in the OpenAPI document, beside the complete response.
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "All at once, or a stream of chunks",
        "content": {"text/event-stream": {}},
    }
}

_PIECE = "\ufdd0"  # stands for a piece of text; no character has this number


class GenerationResponse(Response, ABC):
    """The response to a request whose outputs have been submitted, as the request asks for it.

    The status is sent when the first piece is there, so what is wrong until then has a status of
    its own. What goes wrong later in a stream is its last event, and no [DONE] follows.

    However it ends, so do its outputs, and they end at once when the client disconnects.
    """

    id_prefix: str  # of the responses of an endpoint

    def __init__(
        self,
        service: Service,
        body: GenerationRequest,
        outputs: list[Output],
        *,
        logprobs: bool,
    ) -> None:
        """logprobs: whether it has log-probabilities."""
        super().__init__()
        self._body = body
        self._logprobs = logprobs
        self._outputs = Outputs(outputs)
        self._tokenizer = service.generator.tokenizer
        self._views: list[CacheView] = []
        if body.kept_every is not None:
            self._views = [CacheView(self._tokenizer, output) for output in outputs]
        self._plain: dict[int, list[bytes]] = {}  # of each output, a chunk around its piece
        # What all chunks begin with.
        self._head = ResponseHead(
            id=f"{self.id_prefix}-{uuid4().hex}", created=int(time.time()), model=service.name
        ).model_dump()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. The request's body must have been read."""
        client = asyncio.ensure_future(self._until_disconnect(receive))
        try:
            if self._body.stream:
                async with aclosing(self._outputs.pieces()) as pieces:
                    await self._stream(pieces, send)
            else:
                async with aclosing(self._outputs.pieces()) as pieces:
                    async for _ in pieces:
                        pass
                complete = self.complete(self._outputs.all, self._usage()).model_dump_json()
                await Response(complete, media_type="application/json")(scope, receive, send)
        except ApiError:
            if client.done():
                raise ApiError(499, "the client has left") from None
            raise
        finally:
            client.cancel()
            self._outputs.close()

    @abstractmethod
    def complete(self, outputs: list[Output], usage: Usage) -> BaseModel:
        """All of it, when all outputs have ended."""

    @abstractmethod
    def chunk(self, output: Output, piece: str) -> BaseModel:
        """A piece of an output, and what else is new of it."""

    @abstractmethod
    def last_chunk(self, usage: Usage) -> BaseModel:
        """Of no output."""

    def _kept(self, output: Output) -> KeptTokens | None:
        return self._views[output.index].new() if self._views else None

    async def _until_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._outputs.close()

    async def _stream(self, pieces: AsyncIterator[tuple[Output, str]], send: Send) -> None:
        output, piece = await anext(pieces)
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while not self._outputs.ended:
                await send(_part(self._event(output, piece)))
                output, piece = await anext(pieces)
            await send(_part(self._event(output, piece) + self._end(), more=False))
        except Exception as error:
            shown = error if isinstance(error, ApiError) else internal_error()
            await send(_part(_data(shown.body().encode()), more=False))
            if shown is not error:
                raise

    def _event(self, output: Output, piece: str) -> bytes:
        if output.begun and output.generation is None and not (self._logprobs or self._views):
            around = self._plain.get(output.index)
            if around is None:  # only the piece differs from chunk to chunk
                around = _data_of(self.chunk(output, _PIECE)).split(_PIECE.encode())
                self._plain[output.index] = around
            return json.dumps(piece)[1:-1].encode().join(around)
        event = _data_of(self.chunk(output, piece))
        output.begun = True
        return event

    def _end(self) -> bytes:
        settings = self._body.stream_options
        if settings is None or not settings.include_usage:
            return _data(b"[DONE]")
        return _data_of(self.last_chunk(self._usage())) + _data(b"[DONE]")

    def _usage(self) -> Usage:
        outputs = self._outputs.all
        n_prompt = sum(len(output.prompt) for output in outputs[:: self._body.n])
        n_cached = sum(output.ended.cached_tokens for output in outputs[:: self._body.n])
        n = sum(output.ended.completion_tokens for output in outputs)
        return Usage(
            prompt_tokens=n_prompt,
            completion_tokens=n,
            total_tokens=n_prompt + n,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=n_cached),
        )


def _part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _data(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _data_of(model: BaseModel) -> bytes:
    return _data(model.model_dump_json().encode())
