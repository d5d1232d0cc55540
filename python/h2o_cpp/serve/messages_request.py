"""The request objects of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from h2o_cpp.model.truncation import Truncation
from h2o_cpp.serve.chat_messages import tool_call, without_images
from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.openai_requests import ChatRequest, ModelRequest
from h2o_cpp.serve.sampling import Draft, Protect, StopStrings, TopP
from h2o_cpp.serve.schema import (
    ByType,
    Empty,
    ListOf,
    NonEmptyList,
    NonEmptyText,
    Schema,
    Tolerant,
    check,
)


class TextBlock(Tolerant):
    """Text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(Tolerant):
    """A tool call by the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class TextSource(Tolerant):
    """A document's text."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(Tolerant):
    """A document's text in blocks."""

    type: Literal["content"]
    content: str | ListOf[TextBlock]


class DocumentBlock(Tolerant):
    """A document, which becomes text: its title, context and contents."""

    type: Literal["document"]
    source: ByType[TextSource | ContentSource]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        source = self.source
        data = source.data if isinstance(source, TextSource) else _text(source.content)
        return "\n".join(part for part in (self.title, self.context, data) if part)


class SearchResultBlock(Tolerant):
    """A search result, which becomes text: its title, source and contents."""

    type: Literal["search_result"]
    title: str
    source: str
    content: ListOf[TextBlock]

    @property
    def text(self) -> str:
        return "\n".join((self.title, self.source, _text(self.content)))


TextLike = TextBlock | DocumentBlock | SearchResultBlock
_TextBlocks = ListOf[ByType[TextLike]]


class ToolResultBlock(Tolerant):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | _TextBlocks, BeforeValidator(without_images)] = ""


class ThinkingBlock(Tolerant):
    """The assistant's reasoning."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Tolerant):
    """Encrypted reasoning; ignored."""

    type: Literal["redacted_thinking"]


Block_ = ByType[
    TextBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
]


class AnthropicMessage(Tolerant):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | ListOf[Block_]


class AnthropicTool(Schema):
    """A tool that the model may call."""

    ignored = (
        *("cache_control", "eager_input_streaming", "defer_loading"),
        *("input_examples", "allowed_callers"),
    )
    type: Literal["custom"] = "custom"
    name: NonEmptyText
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="as that of /v1/chat/completions")


class ToolChoice(Schema):
    """Whether the model must call a tool: `any`, or one by name."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Schema):
    """Passed to the chat template as enable_thinking; without it false, as in Anthropic's API."""

    ignored = ("budget_tokens", "display")
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class Conversation(ModelRequest):
    """A conversation, and the tools that the model may call."""

    ignored: ClassVar[tuple[str, ...]] = (
        *("cache_control", "context_management", "output_config", "output_format", "speed"),
        *("fallbacks", "user_profile_id"),
    )
    messages: NonEmptyList[AnthropicMessage]
    system: str | ListOf[TextBlock] | None = None
    tools: ListOf[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    mcp_servers: Empty | None = None
    thread: dict[str, Any] | None = Field(
        None,
        description="not supported, with an error after which clients send whole conversations",
    )

    def chat(self, **options: Any) -> ChatRequest:
        """The equivalent ChatRequest. Raises ApiError."""
        if self.thread is not None:
            raise ApiError(
                400,
                "thread is not supported, expected the whole conversation in messages",
                param="thread",
                details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
            )
        messages = [{"role": "system", "content": _text(self.system)}] if self.system else []
        for message in self.messages:
            for plain in _plain(message):
                _append(messages, plain)
        if messages[-1]["role"] == "assistant" and messages[-1]["content"][-1:].isspace():
            raise ApiError(
                400,
                "the final message of the assistant ends in white space, which cannot be continued",
                param="messages",
            )
        choice = self.tool_choice or ToolChoice(type="auto")
        return check(
            ChatRequest,
            {
                "model": self.model,
                "messages": messages,
                "tools": [_tool(tool) for tool in self.tools or ()],
                "tool_choice": _choice(choice),
                "parallel_tool_calls": not choice.disable_parallel_tool_use,
                "chat_template_kwargs": {
                    "enable_thinking": self.thinking is not None
                    and self.thinking.type != "disabled"
                },
                **options,
            },
        )


class CountRequest(Tolerant, Conversation):
    """A conversation whose tokens are counted; may be the whole body of a MessagesRequest."""


class OutputFormat(Schema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Schema):
    """The format of the output."""

    ignored = ("effort",)
    format: OutputFormat | None = None


class MessagesRequest(Conversation):
    """Answer the last message of a conversation."""

    ignored = (*Conversation.ignored, "metadata", "service_tier", "inference_geo", "diagnostics")
    max_tokens: int = Field(ge=1)
    truncation: Truncation | None = Field(None, description="as in /v1/chat/completions")
    stop_sequences: StopStrings | None = None
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: TopP | None = None
    top_k: int | None = Field(None, ge=0, lt=2**31)
    draft: Draft = True
    protect: Protect = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        None, description="the older name of output_config.format"
    )

    @property
    def schema_of_output(self) -> dict[str, Any] | None:
        form = self.output_config and self.output_config.format
        form = form or self.output_format
        return form.schema_ if form else None


def _plain(message: AnthropicMessage) -> list[dict[str, Any]]:
    """The equivalent chat messages; each tool result becomes a message."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    own: dict[str, Any] = {"role": message.role, "content": ""}
    texts: list[str] = []
    for block in message.content:
        if isinstance(block, TextLike):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            content = _text(block.content)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, ThinkingBlock):
            own["reasoning_content"] = own.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            call = tool_call(block.id, block.name, json.dumps(block.input))
            own.setdefault("tool_calls", []).append(call)
    own["content"] = "\n".join(texts)
    return [*results, own] if texts or len(own) > 2 or not results else results


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message; consecutive ones of the user or the assistant become one turn."""
    role = message["role"]
    if not messages or role != messages[-1]["role"] or role not in ("user", "assistant"):
        messages.append(message)
        return
    last = messages[-1]
    last["content"] = "\n".join(text for text in (last["content"], message["content"]) if text)
    if "reasoning_content" in message:
        last["reasoning_content"] = last.get("reasoning_content", "") + message["reasoning_content"]
    if "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]


def _text(content: str | Sequence[TextLike]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    """The equivalent tool_choice of a ChatRequest."""
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice.name is missing", param="tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}
