"""Answers: the texts of a request, whole or as a stream. What they look like each endpoint says."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from uuid import uuid4

from fastapi import Request
from pydantic import BaseModel

from h2o_cpp.serve.cache_view import CacheView
from h2o_cpp.serve.requests import TextRequest
from h2o_cpp.serve.responses import ResponseHead, Usage
from h2o_cpp.serve.service import Service
from h2o_cpp.serve.streaming import EventStream, unless_client_leaves
from h2o_cpp.serve.texts import ServedText, ServedTexts


class Answer(ABC):
    """The answer to one request, whose texts have been submitted."""

    id_prefix: str  # of the answers of an endpoint

    def __init__(self, service: Service, body: TextRequest, texts: list[ServedText]) -> None:
        self._body = body
        self._texts = ServedTexts(texts)
        self._tokenizer = service.generator.tokenizer
        self._kept = [CacheView(self._tokenizer, text) for text in texts]
        self._begun: set[int] = set()  # the texts of which something has been shown
        # What all responses of this answer begin with.
        self._head = ResponseHead(
            id=f"{self.id_prefix}-{uuid4().hex}", created=int(time.time()), model=service.name
        ).model_dump()

    async def send(self, request: Request) -> BaseModel | EventStream:
        """As the request asks for it. The first piece decides whether it is an error."""
        if not self._body.stream:
            return await unless_client_leaves(request, self._wait())
        pieces = self._texts.pieces()
        first = await unless_client_leaves(request, anext(pieces))
        return EventStream(self._texts, self._chunks(first, pieces))

    @abstractmethod
    def whole(self, texts: list[ServedText], usage: Usage) -> BaseModel:
        """Of texts that have ended."""

    @abstractmethod
    def chunk(self, text: ServedText, piece: str) -> BaseModel:
        """Another piece of a text, and what else is new of it; the last one is empty."""

    @abstractmethod
    def last_chunk(self, usage: Usage) -> BaseModel:
        """Of no text."""

    def _begins(self, text: ServedText) -> bool:
        """Whether nothing of the text has been shown; from now on something has."""
        begins = text.index not in self._begun
        self._begun.add(text.index)
        return begins

    async def _wait(self) -> BaseModel:
        async for _ in self._texts.pieces():
            pass
        return self.whole(self._texts.texts, self._usage())

    async def _chunks(
        self, first: tuple[ServedText, str], pieces: AsyncIterator[tuple[ServedText, str]]
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
