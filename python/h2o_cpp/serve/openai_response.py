"""Responses of /v1/completions and /v1/chat/completions: choices and streamed chunks."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Sequence
from uuid import uuid4

from pydantic import BaseModel

from h2o_cpp.reply import Content, Part
from h2o_cpp.serve.cache_view import CacheView
from h2o_cpp.serve.generation_response import GenerationResponse, sse
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.requests import GenerationRequest
from h2o_cpp.serve.responses import (
    CompletionTokensDetails,
    KeptTokens,
    PromptTokensDetails,
    ResponseHead,
    Usage,
)
from h2o_cpp.serve.service import Service

_PIECE = "\ufdd0"  # placeholder for a piece of text; a Unicode noncharacter


class OpenAIResponse(GenerationResponse):
    """A choice per output. A stream ends with [DONE] unless it failed."""

    id_prefix: str  # of responses
    complete_type: type[BaseModel]  # of a response with all choices
    chunk_type: type[BaseModel]  # of its parts in a stream

    def __init__(self, service: Service, body: GenerationRequest, outputs: list[Output]) -> None:
        super().__init__(outputs, stream=body.stream)
        self._body = body
        self._logprobs = body.n_top is not None
        settings = body.stream_options
        self._streams_usage = settings is not None and settings.include_usage
        self._tokenizer = service.generator.tokenizer
        self._views: list[CacheView] = []
        if body.kept_every is not None:
            self._views = [CacheView(self._tokenizer, output) for output in outputs]
        self._plain: dict[int, list[bytes]] = {}  # by output: a chunk, split at its text
        # The first fields of every chunk.
        self._head = ResponseHead(
            id=f"{self.id_prefix}-{uuid4().hex}", created=int(time.time()), model=service.name
        ).model_dump()

    @abstractmethod
    def choice(self, output: Output) -> BaseModel:
        """The choice of a finished output."""

    @abstractmethod
    def delta(self, output: Output, parts: Sequence[Part]) -> BaseModel:
        """The choice of a chunk, with the new parts of an output."""

    def complete(self, outputs: list[Output]) -> BaseModel:
        choices = [self.choice(output) for output in outputs]
        return self.complete_type(**self._head, choices=choices, usage=self._usage())

    def event(self, output: Output, piece: str) -> bytes:
        """A chunk, unless the piece adds nothing."""
        parts = output.parts(piece, deltas=True)
        if output.generation is None and not (self._logprobs or self._views):
            if not parts:
                return b""
            if output.begun and len(parts) == 1 and isinstance(part := parts[0], Content):
                return self._plain_event(output, part.text)
        event = self._chunk([self.delta(output, parts)])
        output.begun = True
        return event

    def _plain_event(self, output: Output, text: str) -> bytes:
        around = self._plain.get(output.index)
        if around is None:  # chunks differ only in the text
            around = self._chunk([self.delta(output, [Content(_PIECE)])]).split(_PIECE.encode())
            self._plain[output.index] = around
        return json.dumps(text)[1:-1].encode().join(around)

    def end(self) -> bytes:
        """The usage chunk, if requested, and [DONE]."""
        if not self._streams_usage:
            return sse("[DONE]")
        return self._chunk([], self._usage()) + sse("[DONE]")

    def _chunk(self, choices: list[BaseModel], usage: Usage | None = None) -> bytes:
        chunk = self.chunk_type(**self._head, choices=choices, usage=usage)
        return sse(chunk.model_dump_json(exclude=set() if self._streams_usage else {"usage"}))

    def _kept(self, output: Output) -> KeptTokens | None:
        return self._views[output.index].new() if self._views else None

    def _usage(self) -> Usage:
        outputs = self._outputs.all
        first = outputs[:: self._body.n]  # one of each prompt
        n_prompt = sum(len(output.prompt) for output in first)
        n = sum(output.ended.completion_tokens for output in outputs)
        n_cached = sum(output.ended.cached_tokens for output in first)
        n_reasoning = sum(output.count_reasoning(self._tokenizer) for output in outputs)
        return Usage(
            prompt_tokens=n_prompt,
            completion_tokens=n,
            total_tokens=n_prompt + n,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=n_cached),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=n_reasoning),
        )
