"""What clients send: OpenAI's fields as far as they are known here, and some of our own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from h2o_cpp.generation.request import StreamOptions
from h2o_cpp.serve.schema import Schema

# What OpenAI allows, and is only taken where it changes nothing.
_One = Annotated[int, Field(ge=1, le=1)]
_Empty = Annotated[list[Any], Field(max_length=0)]

_TokenKey = Annotated[str, Field(pattern=r"^\d{1,9}$")]
Token = Annotated[int, Field(ge=0, lt=2**31)]
# Lists end at their first error: one is reported, and there may be very many.
_Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Prompts = (
    str
    | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    | _Tokens
    | Annotated[list[_Tokens], Field(min_length=1, fail_fast=True)]
)


def prompt_list(given: Any) -> Sequence[str | list[int]]:
    """Prompts as a list, whatever they came as."""
    is_list = isinstance(given, list) and not isinstance(given[0], int)
    prompts: Sequence[str | list[int]] = given if is_list else [given]
    return prompts


class StreamSettings(Schema):
    """How to stream."""

    ignored = ("include_obfuscation",)
    include_usage: bool = Field(False, description="end with a chunk that has the usage")


class TextFormat(Schema):
    """Text, of any form."""

    type: Literal["text"]


class JsonFormat(Schema):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonObjectFormat(JsonFormat):
    """Or JSON by a schema, as llama.cpp has it."""

    schema_: dict[str, Any] = Field({"type": "object"}, alias="schema")


class JsonSchema(Schema):
    """What the output is, as JSON Schema says it."""

    name: str | None = Field(None, description="ignored")
    description: str | None = Field(None, description="ignored")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="ignored: the output always follows the schema")


class JsonSchemaFormat(Schema):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class ModelRequest(Schema):
    """What all requests to a model have in common."""

    model: str | None = Field(None, description="as /v1/models names it; default: the one there is")


class Sampling(Schema):
    """How to sample, and where to stop. The defaults are those of Generator."""

    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63, description="for the same output again")
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
        | None
    ) = Field(None, description="strings that end the output, and are not part of it")
    top_k: int | None = Field(None, ge=0, lt=2**31, description="0 is all")
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100, description="1 is none")
    repeat_last_n: int | None = Field(None, ge=-1, lt=2**31)
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="for the last repeat_last_n tokens, of the prompt too"
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="for the same tokens")
    logit_bias: dict[_TokenKey, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024, description="added to the logits of tokens, by their ids"
    )
    dry_multiplier: float | None = Field(None, ge=0, le=100, description="0 is none")
    dry_base: float | None = Field(None, ge=1, le=100)
    dry_allowed_length: int | None = Field(None, ge=1, lt=2**31)
    dry_penalty_last_n: int | None = Field(None, ge=-1, lt=2**31)
    dry_sequence_breakers: list[str] | None = Field(None, max_length=64)
    typical_p: float | None = Field(None, gt=0, le=1)
    top_n_sigma: float | None = Field(None, ge=-1, le=1e6, description="0 and -1 are all")
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=1)
    dynatemp_range: float | None = Field(None, ge=0, le=100)
    dynatemp_exponent: float | None = Field(None, ge=0, le=100)
    mirostat: int | None = Field(None, ge=0, le=2)
    mirostat_tau: float | None = Field(None, ge=0, le=100)
    mirostat_eta: float | None = Field(None, ge=0, le=100)
    samplers: list[str] | None = Field(
        None, max_length=16, description="only these, in this order, by llama.cpp's names"
    )
    ignore_eos: bool | None = Field(None, description="continue after the end-of-text token")


class GenerationRequest(ModelRequest, Sampling):
    """What completions and chats have in common."""

    ignored = (
        *("user", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("cache_prompt", "id_slot", "timings_per_token", "return_progress"),  # llama.cpp's
    )

    n: int = Field(
        1, ge=1, description="choices for each prompt, with seeds from seed to seed + n - 1"
    )
    stream: bool = Field(False, description="as server-sent events")
    stream_options: StreamSettings | None = None

    response_format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
        | None
    ) = Field(None, description="one of these, guided_*, grammar and json_schema at most")
    guided_json: dict[str, Any] | str | None = Field(None, description="a schema")
    guided_regex: str | None = Field(None, description="all of the output matches it")
    guided_choice: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, min_length=1, max_length=1024, description="the output is one of these"
    )
    guided_grammar: str | None = Field(None, description="llama.cpp's GBNF, or llguidance's Lark")
    grammar: str | None = Field(None, description="guided_grammar, llama.cpp's name")
    json_schema: dict[str, Any] | None = Field(None, description="guided_json, llama.cpp's name")
    hh: int | float | None = Field(
        None, gt=0, description="what the cache keeps, a fraction of n_ctx or a number of tokens"
    )
    policy: str | None = Field(None, description="by another policy than h2o, as `window`")
    kept_every: int | None = Field(
        None, ge=1, lt=2**31, description="report what is kept every N tokens and at the end"
    )
    metadata: dict[str, str] | None = Field(None, max_length=16, description="ignored")

    def sampling(self) -> StreamOptions:
        """Those options that were given and are called the same everywhere."""
        given: Any = self.model_dump(include={*Sampling.model_fields}, exclude_unset=True)
        for name, form in self._forms():
            if name in given:
                raise ValueError("give one of response_format, guided_*, grammar and json_schema")
            given[name] = form
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        options: StreamOptions = given
        return options

    def _forms(self) -> Iterator[tuple[str, Any]]:
        """What the output has to be, as options of Generator.stream."""
        if isinstance(self.response_format, JsonObjectFormat):
            yield "schema", self.response_format.schema_
        elif isinstance(self.response_format, JsonSchemaFormat):
            yield "schema", self.response_format.json_schema.schema_
        for name, value in (
            ("schema", self.guided_json),
            ("schema", self.json_schema),
            ("regex", self.guided_regex),
            ("choice", self.guided_choice),
            ("grammar", self.guided_grammar),
            ("grammar", self.grammar),
        ):
            if value is not None:
                yield name, value


class CompletionRequest(GenerationRequest):
    """Continue one prompt or several."""

    prompt: Prompts = Field(description="strings, or token ids")
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(
        None, ge=0, le=20, description="of the tokens, and of the N likeliest at each"
    )
    echo: bool = Field(False, description="give the prompt back in front of the text")
    best_of: _One | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """As a list of prompts, whatever it came as."""
        return prompt_list(self.prompt)


class ContentPart(Schema):
    """Part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Schema):
    """What the assistant has called, and with what."""

    name: str
    arguments: str = Field(description="JSON")

    def plain(self) -> dict[str, Any]:
        """As a chat template takes it: with an object of arguments, where they are one."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class ToolCall(Schema):
    """That it has called it, in an earlier turn."""

    ignored = ("index",)
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """As a chat template takes it."""
        return {"id": self.id, "type": self.type, "function": self.function.plain()}


class Message(Schema):
    """A message of the conversation. Its chat template decides what it can be."""

    ignored = ("refusal",)
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="developer is taken as system"
    )
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = Field(
        None, description="left out only beside tool_calls"
    )
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    annotations: _Empty | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing_content", "content is missing")
        return self

    def plain(self) -> dict[str, Any]:
        """As a chat template takes it."""
        role = "system" if self.role == "developer" else self.role
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        message: dict[str, Any] = {"role": role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        return message


class FunctionDefinition(Schema):
    """A tool that the model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema")
    strict: bool | None = Field(None, description="ignored")


class ToolDefinition(Schema):
    """A tool."""

    type: Literal["function"]
    function: FunctionDefinition


class ToolName(Schema):
    """One of them."""

    name: str


class NamedTool(Schema):
    """That the model must call this tool."""

    type: Literal["function"]
    function: ToolName


class ChatRequest(GenerationRequest):
    """Answer the last message of a conversation."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1, description="default: as many as may be")
    max_completion_tokens: int | None = Field(None, ge=1, description="max_tokens, newer name")
    logprobs: bool = Field(False, description="log-probabilities of the answer's tokens")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="of the likeliest at each")

    tools: Annotated[list[ToolDefinition], Field(fail_fast=True)] | None = Field(
        None, description="that the model may call, where its chat template tells it of tools"
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="none: do not tell it of them; required, or one: it must call"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = Field(
        None, description="for the chat template"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables of the chat template, such as enable_thinking"
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="for the chat template; none: enable_thinking is false"
    )

    add_generation_prompt: bool | None = Field(
        None, description="for the chat template; false: it does not begin a reply"
    )

    # Of OpenAI's, what says that there is nothing special about the answer.
    functions: _Empty | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def called_tool(self) -> str | None:
        """The name of the one tool that it has to call."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    def told_tools(self) -> list[dict[str, Any]]:
        """Those that the model is told of, as a chat template takes them."""
        if not self.tools or self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    def conversation(self) -> dict[str, Any]:
        """As the arguments of ChatTemplate.prompt()."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        elif self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.add_generation_prompt is not None:
            variables["add_generation_prompt"] = self.add_generation_prompt
        return {
            "messages": [message.plain() for message in self.messages],
            "tools": self.told_tools(),
            "documents": self.documents,
            "variables": {**variables, **(self.chat_template_kwargs or {})},
        }
