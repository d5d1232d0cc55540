"""OpenAI's chat messages, tools and tool calls."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from h2o_cpp.serve.schema import ByType, ListOf, NonEmptyList, NonEmptyText, Schema, Tolerant


class TextPart(Tolerant):
    """Part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(Tolerant):
    """A refusal by the assistant, which is text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


ContentPart = ByType[TextPart | RefusalPart]


def text_of(content: str | list[Any]) -> str:
    """A message's text: its content, or the joined texts of its parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


_IMAGES = ("image", "image_url", "input_image", "input_file", "file", "input_audio", "audio")
IMAGE_NOTE = "[The tool also returned an image or a file, which this model cannot read.]"


def without_images(content: Any) -> Any:
    """The content of a tool's result, in which a note replaces each image: a client would send it
    again with every turn."""
    if not isinstance(content, list):
        return content
    note = {"type": "text", "text": IMAGE_NOTE}
    return [
        note if isinstance(part, dict) and part.get("type") in _IMAGES else part for part in content
    ]


class CalledFunction(Tolerant):
    """The called function and its arguments."""

    name: str
    arguments: str = Field(description="JSON")

    def plain(self) -> dict[str, Any]:
        """In the form of chat templates: arguments as an object, if they are one."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class ToolCall(Tolerant):
    """A tool call, of an earlier turn or of a response."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """In the form of chat templates."""
        return {"id": self.id, "type": self.type, "function": self.function.plain()}


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A ToolCall as in a request; arguments: JSON."""
    return {"id": id, "function": {"name": name, "arguments": arguments}}


class Message(Tolerant):
    """A message. The chat template determines which roles and fields work."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="developer is taken as system"
    )
    content: str | ListOf[ContentPart] | None = Field(
        None, description="optional only for the assistant"
    )
    refusal: str | None = Field(None, description="the content, if there is none")
    name: str | None = None
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="the same, as some servers name it")

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("role") == "tool":
            return {**values, "content": without_images(values.get("content"))}
        return values

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        # An earlier reply may have been empty.
        if self.content is None and self.refusal is None and self.role != "assistant":
            raise PydanticCustomError("missing_content", "content is missing")
        return self

    def plain(self) -> dict[str, Any]:
        """In the form of chat templates."""
        role = "system" if self.role == "developer" else self.role
        content = text_of(self.content or self.refusal or "")
        message: dict[str, Any] = {"role": role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.reasoning is not None:
            message.setdefault("reasoning_content", self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        return message


class FunctionDefinition(Schema):
    """A function that the model may call."""

    name: NonEmptyText
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema")
    strict: bool | None = Field(
        None, description="refuse parameters that the grammar of a required call cannot enforce"
    )


class ToolDefinition(Schema):
    """A tool."""

    ignored = ("cache_control",)
    type: Literal["function"]
    function: FunctionDefinition


class ToolName(Schema):
    """The name of a tool."""

    name: str


class NamedTool(Schema):
    """Requires a call of this tool."""

    type: Literal["function"]
    function: ToolName


class AllowedTools(Schema):
    """The tools to show to the model, and whether it must call one."""

    mode: Literal["auto", "required"]
    tools: NonEmptyList[NamedTool]


class AllowedToolsChoice(Schema):
    """Leaves only these of `tools`."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
