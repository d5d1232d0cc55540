"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from fastapi import APIRouter
from pydantic import BaseModel, Field

from h2o_cpp.serve.blocks import Block, Blocks
from h2o_cpp.serve.conversation import prompt_of, submit_chat
from h2o_cpp.serve.endpoint import post
from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.generation_response import GenerationResponse, sse
from h2o_cpp.serve.openai_response import EVENTS
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.parsing import check
from h2o_cpp.serve.requests import ChatRequest, ModelRequest
from h2o_cpp.serve.sampling import TopP
from h2o_cpp.serve.schema import Schema
from h2o_cpp.serve.service import Service

router = APIRouter()


class TextBlock(Schema):
    """Text."""

    ignored = ("cache_control", "citations")
    type: Literal["text"]
    text: str


class ToolUseBlock(Schema):
    """A tool call by the assistant."""

    ignored = ("caller", "cache_control")
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class TextSource(Schema):
    """A document's text."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(Schema):
    """A document's text in blocks."""

    type: Literal["content"]
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)]


class DocumentBlock(Schema):
    """A document, which becomes text: its title, context and contents."""

    ignored = ("cache_control", "citations")
    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        """The text."""
        source = self.source
        data = source.data if isinstance(source, TextSource) else _text(source.content)
        return "\n".join(part for part in (self.title, self.context, data) if part)


_TextBlocks = Annotated[
    list[Annotated[TextBlock | DocumentBlock, Field(discriminator="type")]], Field(fail_fast=True)
]


class ToolResultBlock(Schema):
    """The result of a tool call."""

    ignored = ("is_error", "cache_control")
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | _TextBlocks = ""


class ThinkingBlock(Schema):
    """The assistant's reasoning."""

    ignored = ("signature",)
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Schema):
    """Encrypted reasoning; ignored."""

    ignored = ("data",)
    type: Literal["redacted_thinking"]


Block_ = Annotated[
    TextBlock
    | DocumentBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(Schema):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block_], Field(fail_fast=True)]


class AnthropicTool(Schema):
    """A tool that the model may call."""

    ignored = (
        *("strict", "cache_control", "eager_input_streaming", "defer_loading"),
        *("input_examples", "allowed_callers"),
    )
    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Schema):
    """Whether the model must call a tool: `any`, or one by name."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Schema):
    """Passed to the chat template as enable_thinking."""

    ignored = ("budget_tokens", "display")
    type: Literal["enabled", "disabled", "adaptive"]


class CountRequest(ModelRequest):
    """A conversation whose tokens are counted."""

    ignored: ClassVar[tuple[str, ...]] = (
        *("cache_control", "context_management", "output_config", "speed"),
    )
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    def chat(self, **options: Any) -> ChatRequest:
        """The equivalent ChatRequest. Raises ApiError."""
        messages = [{"role": "system", "content": _text(self.system)}] if self.system else []
        for message in self.messages:
            messages += _plain(message)
        choice = self.tool_choice or ToolChoice(type="auto")
        return check(
            ChatRequest,
            {
                "model": self.model,
                "messages": messages,
                "tools": [_tool(tool) for tool in self.tools or ()],
                "tool_choice": _choice(choice),
                "parallel_tool_calls": not choice.disable_parallel_tool_use,
                "chat_template_kwargs": None
                if self.thinking is None
                else {"enable_thinking": self.thinking.type != "disabled"},
                **options,
            },
        )


class OutputFormat(Schema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Schema):
    """The format of the output."""

    ignored = ("effort",)
    format: OutputFormat | None = None


class MessagesRequest(CountRequest):
    """Answer the last message of a conversation."""

    ignored = (*CountRequest.ignored, "metadata", "service_tier", "inference_geo")
    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(max_length=16)
    ] | None = None  # fmt: skip
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: TopP | None = None
    top_k: int | None = Field(None, ge=0, lt=2**31)
    output_config: OutputConfig | None = None


class MessageUsage(BaseModel):
    """Token counts; input_tokens excludes those from the prefix cache."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0  # caching costs nothing
    output_tokens: int


class AnthropicResponse(BaseModel):
    """The assistant's message, in blocks."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use"] | None
    stop_sequence: None = None
    usage: MessageUsage


class TokenCount(BaseModel):
    """The number of tokens of a conversation."""

    input_tokens: int


@post(router, "/v1/messages/count_tokens", CountRequest, response_model=TokenCount, quick=False)
def count_tokens(service: Service, body: CountRequest) -> TokenCount:
    """Count the tokens of a conversation."""
    return TokenCount(input_tokens=len(prompt_of(service, body.chat()).tokens))


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
    form = body.output_config and body.output_config.format
    chat = body.chat(
        guided_json=form.schema_ if form else None,
        max_tokens=min(body.max_tokens, service.max_tokens),
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
    )
    return _Message(service.name, submit_chat(service, chat), stream=body.stream)


class _Message(GenerationResponse):
    def __init__(self, model: str, outputs: list[Output], *, stream: bool) -> None:
        super().__init__(outputs, stream=stream)
        self._id, self._model = f"msg_{uuid4().hex}", model
        self._blocks = Blocks()

    def complete(self, outputs: list[Output]) -> AnthropicResponse:
        [output] = outputs
        return self._response([_content(one) for one in self._blocks.add_all(output)], output)

    def _response(self, content: list[dict[str, Any]], output: Output) -> AnthropicResponse:
        return AnthropicResponse(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=None if output.generation is None else _stop_reason(output),
            usage=_usage(output),
        )

    def begin(self) -> bytes:
        """The event with the empty message."""
        [output] = self._outputs.all
        message = self._response([], output).model_dump()
        message |= {"stop_reason": None, "usage": {**message["usage"], "output_tokens": 0}}
        return _event("message_start", message=message)

    def event(self, output: Output, piece: str) -> bytes:
        """The events for the blocks that a piece changes."""
        return b"".join(_block_event(*step) for step in self._blocks.add(output, piece))

    def end(self) -> bytes:
        """The events with the stop reason and the usage."""
        [output] = self._outputs.all
        delta = {"stop_reason": _stop_reason(output), "stop_sequence": None}
        usage = _usage(output).model_dump()
        return _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return sse(error.body("/v1/messages").encode(), "error")


def _usage(output: Output) -> MessageUsage:
    n_cached = output.completion.cached_tokens
    return MessageUsage(
        input_tokens=len(output.prompt) - n_cached,
        cache_read_input_tokens=n_cached,
        output_tokens=0 if output.generation is None else output.generation.completion_tokens,
    )


def _stop_reason(output: Output) -> Literal["end_turn", "max_tokens", "tool_use"]:
    if output.finish_reason == "tool_calls":
        return "tool_use"
    return "end_turn" if output.finish_reason == "stop" else "max_tokens"


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "call":
        arguments = json.loads(block.text)
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}
    return {"type": "text", "text": block.text}


def _block_event(step: str, block: Block, text: str) -> bytes:
    if step == "end":
        return _event("content_block_stop", index=block.index)
    if step == "begin":
        empty = Block(block.index, block.kind, "{}" if block.kind == "call" else "", block.name)
        empty.id = block.id
        return _event("content_block_start", index=block.index, content_block=_content(empty))
    kind, field = {
        "text": ("text_delta", "text"),
        "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }[block.kind]
    delta = {"type": kind, field: text}
    return _event("content_block_delta", index=block.index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return sse(json.dumps({"type": kind, **fields}).encode(), kind)


def _plain(message: AnthropicMessage) -> list[dict[str, Any]]:
    """The equivalent chat messages; each tool result becomes a message."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    own: dict[str, Any] = {"role": message.role, "content": ""}
    texts: list[str] = []
    for block in message.content:
        if isinstance(block, TextBlock | DocumentBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            content = _text(block.content)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, ThinkingBlock):
            own["reasoning_content"] = own.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            call = {"id": block.id, "type": "function", "function": function}
            own.setdefault("tool_calls", []).append(call)
    own["content"] = "\n".join(texts)
    return [*results, own] if texts or len(own) > 2 or not results else results


def _text(content: str | Sequence[TextBlock | DocumentBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    """The equivalent tool_choice of a ChatRequest."""
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice.name is missing", param="tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}
