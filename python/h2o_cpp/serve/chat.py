"""POST /v1/chat/completions: answer the last message of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fastapi import APIRouter

from h2o_cpp.reply import CallDelta, Content, Part, Reasoning
from h2o_cpp.serve.chat_messages import CalledFunction, ToolCall
from h2o_cpp.serve.conversation import submit_chat
from h2o_cpp.serve.endpoint import post
from h2o_cpp.serve.generation_response import EVENTS
from h2o_cpp.serve.logprobs import chat_logprobs
from h2o_cpp.serve.openai_response import OpenAIResponse
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.requests import ChatRequest
from h2o_cpp.serve.responses import (
    CalledFunctionDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    ToolCallDelta,
)
from h2o_cpp.serve.service import Service

router = APIRouter()


@post(
    router,
    "/v1/chat/completions",
    ChatRequest,
    response_model=ChatResponse,
    responses=EVENTS,
    quick=False,
)
def create_chat_completion(service: Service, body: ChatRequest) -> _Chat:
    """Answer the last message."""
    return _Chat(service, body, submit_chat(service, body))


class _Chat(OpenAIResponse):
    id_prefix = "chatcmpl"
    complete_type = ChatResponse
    chunk_type = ChatChunk

    def choice(self, output: Output) -> ChatChoice:
        output.parts(output.ended.text)
        reply = output.reply
        calls = [
            ToolCall(
                id=output.call_id(i),
                function=CalledFunction(name=call.name, arguments=call.arguments),
            )
            for i, call in enumerate(reply.calls)
        ]
        return ChatChoice(
            index=output.index,
            message=ChatMessage(
                content=None if calls and not reply.content else reply.content,
                reasoning_content=reply.reasoning or None,
                tool_calls=calls or None,
            ),
            logprobs=self._new_logprobs(output),
            finish_reason=output.finish_reason,
            kept=self._kept(output),
        )

    def delta(self, output: Output, parts: Sequence[Part]) -> ChatChunkChoice:
        """The first one of a message has the role."""
        role: Literal["assistant"] | None = None if output.begun else "assistant"
        content = [part.text for part in parts if isinstance(part, Content)]
        reasoning = [part.text for part in parts if isinstance(part, Reasoning)]
        calls = [_delta(output, part) for part in parts if isinstance(part, CallDelta)]
        return ChatChunkChoice(
            index=output.index,
            delta=ChatDelta(
                role=role,
                content="".join(content) or None,
                reasoning_content="".join(reasoning) or None,
                tool_calls=calls or None,
            ),
            logprobs=self._new_logprobs(output),
            finish_reason=output.finish_reason,
            kept=self._kept(output),
        )

    def _new_logprobs(self, output: Output) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return chat_logprobs(self._tokenizer, output.new_logprobs())


def _delta(output: Output, part: CallDelta) -> ToolCallDelta:
    begins = part.name is not None
    return ToolCallDelta(
        index=part.index,
        id=output.call_id(part.index) if begins else None,
        type="function" if begins else None,
        function=CalledFunctionDelta(name=part.name, arguments=part.arguments),
    )
