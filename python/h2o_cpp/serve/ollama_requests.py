"""The request objects of Ollama's API."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from h2o_cpp.serve.chat_messages import IMAGE_NOTE, FunctionDefinition, tool_call
from h2o_cpp.serve.openai_requests import ModelRequest, Token
from h2o_cpp.serve.sampling import Draft, Protect, Sampling, TopLogprobs
from h2o_cpp.serve.schema import Empty, ListOf, NoText, Tolerant


class Options(Tolerant, Sampling):
    """Sampling options. Others, such as those for the machine, are ignored."""

    num_predict: int | None = Field(None, ge=-2, description="-1: no limit")
    num_keep: int | None = Field(
        None, ge=-1, lt=2**31, description="first tokens kept of a raw prompt that is cut; -1: most"
    )

    @model_validator(mode="before")
    @classmethod
    def _as_in_ollama(cls, values: Any) -> Any:
        """Whole numbers may be floats, as some languages write them; repeat_penalty 0 is none."""
        if not isinstance(values, dict):
            return values
        values = {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in values.items()
        }
        if type(values.get("repeat_penalty")) is int and values["repeat_penalty"] == 0:
            del values["repeat_penalty"]
        return values

    def generation(self) -> dict[str, Any]:
        """The equivalent fields of a GenerationRequest."""
        options = self.model_dump(exclude_unset=True, exclude={"num_predict", "num_keep"})
        if self.num_predict is not None and self.num_predict > 0:
            options["max_tokens"] = self.num_predict
        return options


class OllamaModelRequest(Tolerant, ModelRequest):
    """The model of a request."""


class OllamaRequest(OllamaModelRequest):
    """Fields that chats and prompts share."""

    keep_alive: int | float | str | None = Field(
        None, description="0 without a prompt: unload the model; otherwise ignored"
    )
    stream: bool = Field(True, description="a line of JSON for each piece")
    options: Options | None = None
    draft: Draft = True
    protect: Protect = None
    truncate: bool | None = Field(
        None, description="true: as truncation auto in /v1/chat/completions; false: as error"
    )
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        None, description="json: any object; or a JSON Schema"
    )
    logprobs: bool = Field(False, description="return log-probabilities")
    top_logprobs: TopLogprobs = None
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        None, description="passed to the chat template"
    )

    @model_validator(mode="after")
    def _has_logprobs(self) -> OllamaRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs")
        return self

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to answer: the request only loads or unloads the model."""
        return False

    @property
    def unloads(self) -> bool:
        return self.is_empty and self.keep_alive in (0, "0", "0s")

    def generation(self) -> dict[str, Any]:
        """The equivalent fields of a GenerationRequest."""
        fields: dict[str, Any] = {} if self.options is None else self.options.generation()
        fields |= {"stream": self.stream, "draft": self.draft, "protect": self.protect}
        if self.truncate is not None:
            fields["truncation"] = "auto" if self.truncate else "error"
        if self.format:
            fields["json_schema"] = {"type": "object"} if self.format == "json" else self.format
        return fields

    def chat(self) -> dict[str, Any]:
        """The equivalent fields of a ChatRequest."""
        fields = self.generation()
        fields |= {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        if isinstance(self.think, bool):
            fields["chat_template_kwargs"] = {"enable_thinking": self.think}
        elif self.think is not None:
            fields["reasoning_effort"] = self.think
        return fields


class OllamaFunction(Tolerant):
    """The called function."""

    name: str
    arguments: dict[str, Any]


class OllamaCall(Tolerant):
    """A tool call by the assistant."""

    function: OllamaFunction
    id: str | None = None


def _lower(role: Any) -> Any:
    return role.lower() if isinstance(role, str) else role


class OllamaMessage(Tolerant):
    """A message."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_lower)]
    content: str = ""
    thinking: str | None = None
    tool_calls: ListOf[OllamaCall] | None = None
    images: Empty | None = None
    tool_name: str | None = None
    name: str | None = Field(None, description="the older name of tool_name")
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("role") == "tool" and values.get("images"):
            content = f"{values.get('content') or ''}\n{IMAGE_NOTE}".lstrip()
            return {**values, "content": content, "images": None}
        return values

    def plain(self) -> dict[str, Any]:
        """The equivalent chat message."""
        calls = [
            tool_call(
                call.id or f"call{i:05}", call.function.name, json.dumps(call.function.arguments)
            )
            for i, call in enumerate(self.tool_calls or ())
        ]
        return {
            "role": self.role,
            "content": self.content,
            "reasoning_content": self.thinking or None,
            "name": self.tool_name or self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": calls or None,
        }


class OllamaFunctionDefinition(Tolerant, FunctionDefinition):
    """A function that the model may call."""


class OllamaTool(Tolerant):
    """A tool."""

    function: OllamaFunctionDefinition

    def plain(self) -> dict[str, Any]:
        """The equivalent ToolDefinition."""
        return {"type": "function", "function": self.function.model_dump(exclude_unset=True)}


class OllamaChatRequest(OllamaRequest):
    """Answer the last message of a conversation; without one, load the model."""

    messages: ListOf[OllamaMessage] = Field(default_factory=list)
    tools: ListOf[OllamaTool] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.messages


class OllamaGenerateRequest(OllamaRequest):
    """Answer a prompt; continue it instead if `raw` is set or the model has no chat template.

    Without a prompt, load the model.
    """

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    suffix: str | None = Field(
        None, description="the text after the output, for models that fill in the middle"
    )
    template: NoText | None = None
    context: ListOf[Token] | None = Field(
        None, description="of an earlier response, which the prompt follows; it includes `system`"
    )
    images: Empty | None = None

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    @property
    def n_keep(self) -> int:
        """The first tokens to keep of a raw prompt that is cut; -1: most."""
        given = None if self.options is None else self.options.num_keep
        return 4 if given is None else given  # Ollama's default


class OllamaEmbedRequest(OllamaModelRequest):
    """One or several texts to embed; without one, load the model."""

    input: str | ListOf[str] = ""
    truncate: bool = Field(True, description="cut texts that are too long")
    dimensions: int | None = Field(
        None, ge=0, lt=2**31, description="only so many of each embedding; 0: all"
    )


class OllamaEmbeddingRequest(OllamaModelRequest):
    """A text to embed, in the older form; without one, load the model."""

    prompt: str = ""
    truncate: bool = Field(True, description="cut a text that is too long")


class ShowRequest(OllamaModelRequest):
    """The model to describe."""

    name: str | None = Field(None, description="the older name of model")

    @model_validator(mode="after")
    def _named(self) -> ShowRequest:
        if self.model is None:
            self.model = self.name
        return self
