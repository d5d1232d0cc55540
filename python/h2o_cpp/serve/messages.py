"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import json
from typing import Any, Literal
from uuid import uuid4

from fastapi import APIRouter
from pydantic import BaseModel

from h2o_cpp.serve import conversation
from h2o_cpp.serve.blocks import Block, Blocks, Step
from h2o_cpp.serve.conversation import submit_chat
from h2o_cpp.serve.endpoint import post
from h2o_cpp.serve.errors import ERRORS
from h2o_cpp.serve.generation_response import EVENTS, GenerationResponse, sse
from h2o_cpp.serve.messages_request import CountRequest, MessagesRequest
from h2o_cpp.serve.openai_responses import IF_THERE, LostTokens, MessageMemory
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.service import Service

router = APIRouter(responses=ERRORS)


class MessageUsage(BaseModel):
    """Token counts; input_tokens excludes those from the prefix cache."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0  # caching costs nothing
    output_tokens: int
    prompt_memory: LostTokens


class AnthropicResponse(BaseModel):
    """The assistant's message, in blocks."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None = None
    usage: MessageUsage
    message_memory: MessageMemory | None = IF_THERE


class TokenCount(BaseModel):
    """The number of tokens of a conversation."""

    input_tokens: int


_SAME_IN_CHATS = {
    *("draft", "max_tokens", "protect", "stream", "temperature", "top_k", "top_p", "truncation"),
}


@post(router, "/v1/messages/count_tokens", CountRequest, response_model=TokenCount, quick=False)
def count_tokens(service: Service, body: CountRequest) -> TokenCount:
    """Count the tokens of a conversation."""
    return TokenCount(input_tokens=conversation.count_tokens(service, body.chat()))


@post(
    router,
    "/v1/messages",
    MessagesRequest,
    response_model=AnthropicResponse,
    responses=EVENTS,
    quick=False,
)
def create_message(service: Service, body: MessagesRequest) -> _Message:
    """Answer the last message."""
    chat = body.chat(
        guided_json=body.schema_of_output,
        stop=body.stop_sequences,
        **body.model_dump(include=_SAME_IN_CHATS),
    )
    return _Message(service.name, submit_chat(service, chat), stream=body.stream)


class _Message(GenerationResponse):
    api = "Anthropic"

    def __init__(self, model: str, outputs: list[Output], *, stream: bool) -> None:
        super().__init__(outputs, stream=stream)
        self._id, self._model = f"msg_{uuid4().hex}", model
        self._blocks = Blocks()

    def complete(self, outputs: list[Output]) -> AnthropicResponse:
        [output] = outputs
        content = [_content(block) for block in self._blocks.add_all(output)]
        usage = _usage(output, output.ended.completion_tokens)
        return AnthropicResponse(
            id=self._id,
            model=self._model,
            content=content,
            **_ending(output),
            usage=usage,
            message_memory=output.message_memory,
        )

    def begin(self) -> bytes:
        """The event with the empty message."""
        usage = _usage(self._outputs.all[0], 0)
        message = AnthropicResponse(
            id=self._id, model=self._model, content=[], stop_reason=None, usage=usage
        )
        return _event("message_start", message=message.model_dump())

    def ping(self) -> bytes:
        return _event("ping")

    def event(self, output: Output, piece: str) -> bytes:
        """The events for the blocks that a piece changes."""
        return b"".join(_block_event(step) for step in self._blocks.add(output, piece))

    def end(self) -> bytes:
        """The events with the stop reason and the usage."""
        [output] = self._outputs.all
        usage = _usage(output, output.ended.completion_tokens).model_dump()
        memory = output.message_memory
        ending = {"usage": usage} | ({"message_memory": memory} if memory else {})
        return _event("message_delta", delta=_ending(output), **ending) + _event("message_stop")


def _usage(output: Output, n_generated: int) -> MessageUsage:
    n_cached = output.completion.cached_tokens
    return MessageUsage(
        input_tokens=len(output.prompt) - n_cached,
        cache_read_input_tokens=n_cached,
        output_tokens=n_generated,
        prompt_memory=LostTokens.of(output.prompt_memory),
    )


def _ending(output: Output) -> dict[str, Any]:
    if output.finish_reason == "stop" and output.ended.stop_string:
        return {"stop_reason": "stop_sequence", "stop_sequence": output.ended.stop_string}
    reasons = {"tool_calls": "tool_use", "stop": "end_turn", "length": "max_tokens"}
    return {"stop_reason": reasons[output.finish_reason or "length"], "stop_sequence": None}


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "call":
        arguments = json.loads(block.text or "{}")
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}
    return {"type": "text", "text": block.text}


def _block_event(step: Step) -> bytes:
    block = step.block
    if step.kind == "end":
        return _event("content_block_stop", index=block.index)
    if step.kind == "begin":
        return _event("content_block_start", index=block.index, content_block=_content(block))
    kind, field = {
        "text": ("text_delta", "text"),
        "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }[block.kind]
    delta = {"type": kind, field: step.text}
    return _event("content_block_delta", index=block.index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return sse(json.dumps({"type": kind, **fields}), kind)
