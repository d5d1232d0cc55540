"""POST /v1/chat/completions: answer the last message of a conversation."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from h2o_cpp.serve.answer import Answer
from h2o_cpp.serve.dependencies import ServiceOf
from h2o_cpp.serve.errors import ApiError, refusal
from h2o_cpp.serve.logprobs import chat_logprobs
from h2o_cpp.serve.requests import ChatRequest
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
from h2o_cpp.serve.streaming import EVENTS
from h2o_cpp.serve.texts import ServedText

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatResponse, responses=EVENTS)
async def create_chat_completion(body: ChatRequest, request: Request, service: ServiceOf) -> object:
    """Answer the last message."""
    texts = await run_in_threadpool(_submit, service, body)
    return await _Chat(service, body, texts).send(request)


def _submit(service: Service, body: ChatRequest) -> list[ServedText]:
    if service.template is None:
        raise ApiError(400, "the model has no chat template; use /v1/completions")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "give either max_tokens or max_completion_tokens, not both")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs")
    try:
        prompt = service.template.tokens([message.plain() for message in body.messages])
    except ValueError as error:
        raise refusal(error) from error
    return service.submit(
        [prompt],
        body,
        max_tokens=body.max_tokens or body.max_completion_tokens,
        n_top=(body.top_logprobs or 0) if body.logprobs else None,
    )


class _Chat(Answer):
    """What the assistant says."""

    id_prefix = "chatcmpl"

    def __init__(self, service: Service, body: ChatRequest, texts: list[ServedText]) -> None:
        super().__init__(service, body, texts)
        self._logprobs = body.logprobs

    def whole(self, texts: list[ServedText], usage: Usage) -> ChatResponse:
        """A message for each sequence."""
        return ChatResponse(
            **self._head,
            choices=[
                ChatChoice(
                    index=text.index,
                    message=ChatMessage(content=text.ended.text),
                    logprobs=self._new_logprobs(text),
                    finish_reason=text.finish_reason,
                    kept=self._kept[text.index].new(),
                )
                for text in texts
            ],
            usage=usage,
        )

    def chunk(self, text: ServedText, piece: str) -> ChatChunk:
        """What is added to a message, whose first chunk has the role."""
        role: Literal["assistant"] | None = "assistant" if self._begins(text) else None
        choice = ChatChunkChoice(
            index=text.index,
            delta=ChatDelta(role=role, content=piece),
            logprobs=self._new_logprobs(text),
            finish_reason=text.finish_reason,
            kept=self._kept[text.index].new(),
        )
        return self._chunk([choice])

    def last_chunk(self, usage: Usage) -> ChatChunk:
        """Without choices."""
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(**self._head, choices=choices, usage=usage)

    def _new_logprobs(self, text: ServedText) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return chat_logprobs(self._tokenizer, text.new_logprobs())
