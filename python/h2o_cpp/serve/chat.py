"""POST /v1/chat/completions: answer the last message of a conversation."""

from __future__ import annotations

from functools import partial
from typing import Literal

from fastapi import APIRouter, Request

from h2o_cpp.serve.dependencies import ServiceOf
from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.logprobs import chat_logprobs
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.parsing import body_of, parse
from h2o_cpp.serve.requests import ChatRequest
from h2o_cpp.serve.response_stream import EVENTS, GenerationResponse
from h2o_cpp.serve.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    Usage,
)
from h2o_cpp.serve.service import Service

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=ChatResponse,
    responses=EVENTS,
    openapi_extra=body_of(ChatRequest),
)
async def create_chat_completion(request: Request, service: ServiceOf) -> object:
    """Answer the last message."""
    sent = await request.body()
    return await service.intake.run(len(sent), partial(_submit, service, sent), quick=False)


def _submit(service: Service, sent: bytes) -> _Chat:
    body = parse(ChatRequest, sent)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "give either max_tokens or max_completion_tokens, not both")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs")
    outputs = service.submit(
        [service.chat_tokens([message.plain() for message in body.messages])],
        body,
        max_tokens=body.max_tokens or body.max_completion_tokens,
        n_top=(body.top_logprobs or 0) if body.logprobs else None,
    )
    body.messages = []  # they may be long
    return _Chat(service, body, outputs)


class _Chat(GenerationResponse):
    """What the assistant says."""

    id_prefix = "chatcmpl"

    def __init__(self, service: Service, body: ChatRequest, outputs: list[Output]) -> None:
        super().__init__(service, body, outputs, logprobs=body.logprobs)

    def complete(self, outputs: list[Output], usage: Usage) -> ChatResponse:
        """A message for each output."""
        return ChatResponse(
            **self._head,
            choices=[
                ChatChoice(
                    index=output.index,
                    message=ChatMessage(content=output.ended.text),
                    logprobs=self._new_logprobs(output),
                    finish_reason=output.finish_reason,
                    kept=self._kept(output),
                )
                for output in outputs
            ],
            usage=usage,
        )

    def chunk(self, output: Output, piece: str) -> ChatChunk:
        """What is added to a message, whose first chunk has the role."""
        role: Literal["assistant"] | None = None if output.begun else "assistant"
        choice = ChatChunkChoice(
            index=output.index,
            delta=ChatDelta(role=role, content=piece),
            logprobs=self._new_logprobs(output),
            finish_reason=output.finish_reason,
            kept=self._kept(output),
        )
        return self._chunk([choice])

    def last_chunk(self, usage: Usage) -> ChatChunk:
        """Without choices."""
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(**self._head, choices=choices, usage=usage)

    def _new_logprobs(self, output: Output) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return chat_logprobs(self._tokenizer, output.new_logprobs())
