"""Answers: the texts of a request, whole or as a stream. What they look like each endpoint says."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from uuid import uuid4

from fastapi import Request
from pydantic import BaseModel

from h2o_cpp.serve.kept import KeptView
from h2o_cpp.serve.requests import TextRequest
from h2o_cpp.serve.responses import Usage
from h2o_cpp.serve.service import Service
from h2o_cpp.serve.streaming import EventStream, unless_client_leaves
from h2o_cpp.serve.texts import Text, Texts


class Answer(ABC):
    """The answer to one request, whose texts have been submitted."""

    def __init__(self, service: Service, body: TextRequest, texts: list[Text]) -> None:
        self._body = body
        self._texts = Texts(texts)
        self._tokenizer = service.generator.tokenizer
        self._kept = [KeptView(self._tokenizer, text) for text in texts]
        self._model = service.name
        self._created = int(time.time())
        self._id = uuid4().hex

    async def send(self, request: Request) -> BaseModel | EventStream:
        """As the request asks for it. The first piece decides whether it is an error."""
        if not self._body.stream:
            return await unless_client_leaves(request, self._wait())
        pieces = self._texts.pieces()
        first = await unless_client_leaves(request, anext(pieces))
        return EventStream(self._texts, self._chunks(first, pieces))

    @abstractmethod
    def whole(self, texts: list[Text], usage: Usage) -> BaseModel:
        """Of texts that have ended."""

    @abstractmethod
    def chunk(self, text: Text, piece: str) -> BaseModel:
        """Another piece of a text, and what else is new of it; the last one is empty."""

    @abstractmethod
    def last_chunk(self, usage: Usage) -> BaseModel:
        """Of no text."""

    async def _wait(self) -> BaseModel:
        async for _ in self._texts.pieces():
            pass
        return self.whole(self._texts.texts, self._usage())

    async def _chunks(
        self, first: tuple[Text, str], pieces: AsyncIterator[tuple[Text, str]]
    ) -> AsyncIterator[BaseModel]:
        yield self.chunk(*first)
        async for text, piece in pieces:
            yield self.chunk(text, piece)
        settings = self._body.stream_options
        if settings is not None and settings.include_usage:
            yield self.last_chunk(self._usage())

    def _usage(self) -> Usage:
        texts = self._texts.texts
        n_prompt = sum(len(text.prompt) for text in texts[:: self._body.n])
        n = sum(text.ended.completion_tokens for text in texts)
        return Usage(prompt_tokens=n_prompt, completion_tokens=n, total_tokens=n_prompt + n)
