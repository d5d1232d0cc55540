"""OpenAI's request objects, with extensions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from h2o_cpp.generation.request import StreamOptions
from h2o_cpp.model.truncation import Truncation
from h2o_cpp.reply import supported
from h2o_cpp.serve.chat_messages import (
    AllowedToolsChoice,
    Message,
    NamedTool,
    ToolDefinition,
)
from h2o_cpp.serve.sampling import Draft, Protect, Sampling, TopLogprobs
from h2o_cpp.serve.schema import ByType, Empty, ListOf, NonEmptyList, NonEmptyText, Schema

Token = Annotated[int, Field(ge=0, lt=2**31)]


def _token_limit(limit: int) -> int | None:
    if limit == -1:  # none, as in llama.cpp
        return None
    if limit < 1:
        raise PydanticCustomError("token_limit", "Input should be -1 or greater than or equal to 1")
    return limit


_LIMITS = [{"type": "integer", "const": -1}, {"type": "integer", "minimum": 1}]
TokenLimit = Annotated[int, AfterValidator(_token_limit), WithJsonSchema({"anyOf": _LIMITS})]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_Tokens = NonEmptyList[Token]
Prompts = str | NonEmptyList[str] | _Tokens | NonEmptyList[_Tokens]


def prompt_list(given: Any) -> Sequence[str | list[int]]:
    is_list = isinstance(given, list) and not isinstance(given[0], int)
    prompts: Sequence[str | list[int]] = given if is_list else [given]
    return prompts


class StreamSettings(Schema):
    """Options of a stream."""

    ignored = ("include_obfuscation",)
    include_usage: bool = Field(False, description="end with a chunk that contains the usage")


class TextFormat(Schema):
    """Plain text."""

    type: Literal["text"]


class JsonFormat(Schema):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonObjectFormat(JsonFormat):
    """Any JSON object, or JSON that follows a schema, as in llama.cpp."""

    schema_: dict[str, Any] = Field({"type": "object"}, alias="schema")
    value: dict[str, Any] | None = Field(None, description="the schema, by Hugging Face's name")


class JsonSchema(Schema):
    """A JSON Schema that the output follows."""

    name: str | None = Field(None, description="ignored")
    description: str | None = Field(None, description="ignored")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(
        None, description="true: refuse a schema that is not supported, rather than ignore parts"
    )


class JsonSchemaFormat(Schema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuredOutputs(Schema):
    """vLLM's form of guided_*: one of these."""

    ignored = ("disable_any_whitespace", "disable_fallback", "backend")
    json_: dict[str, Any] | str | None = Field(default=None, alias="json", description="a schema")
    regex: str | None = None
    choice: list[NonEmptyText] | None = Field(default=None, min_length=1, max_length=1024)
    grammar: str | None = None
    json_object: Literal[True] | None = Field(default=None, description="any JSON object")


class ModelRequest(Schema):
    """Fields that all requests to a model share."""

    model: str | None = Field(None, description="a name from /v1/models; default: the only model")

    @property
    def unloads(self) -> bool:
        return False

    @property
    def has_form(self) -> bool:
        """Whether the output has a schema or a grammar."""
        return False

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar is compiled."""
        return self.has_form


class GenerationRequest(ModelRequest, Sampling):
    """Fields that completions and chats share."""

    ignored: ClassVar[tuple[str, ...]] = (
        *("user", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention", "verbosity"),
        # vLLM's, OpenRouter's and LM Studio's:
        *("request_id", "priority", "cache_salt", "session_id", "usage", "provider", "ttl"),
        # llama.cpp's:
        *("cache_prompt", "id_slot", "timings_per_token", "backend_sampling"),
        *("n_discard", "penalize_nl", "tfs_z", "return_tokens", "verbose"),
    )

    n: int = Field(
        1, ge=1, description="choices for each prompt, with seeds from seed to seed + n - 1"
    )
    n_predict: TokenLimit | None = Field(None, description="llama.cpp's name of max_tokens")
    stream: bool = Field(False, description="as server-sent events")
    stream_options: StreamSettings | None = None

    response_format: ByType[TextFormat | JsonObjectFormat | JsonSchemaFormat] | None = Field(
        None,
        description="at most one of this, structured_outputs, guided_*, grammar and json_schema",
    )
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="a schema")
    guided_regex: str | None = Field(None, description="the whole output matches it")
    guided_choice: list[NonEmptyText] | None = Field(
        None, min_length=1, max_length=1024, description="the output is one of these"
    )
    guided_grammar: str | None = Field(None, description="llama.cpp's GBNF, or llguidance's Lark")
    grammar: str | None = Field(None, description="llama.cpp's name of guided_grammar")
    json_schema: dict[str, Any] | None = Field(None, description="llama.cpp's name of guided_json")
    hh: int | float | None = Field(
        None, gt=0, description="the cache's budget, a fraction of n_ctx or a number of tokens"
    )
    policy: str | None = Field(
        None, description="the policy for hh, such as `window`; default: the server's"
    )
    protect: Protect = None
    truncation: Truncation | None = Field(
        None,
        description="auto: a prompt that is too long loses its oldest turns, or a text its oldest "
        "tokens; error: status 400; default: the server's",
    )
    n_keep: int = Field(0, ge=-1, description="the first tokens that a text keeps; -1: most")
    draft: Draft = True
    return_progress: bool = Field(
        False,
        description="in a stream, how much of the prompt was read, every two seconds, as "
        "llama-server's",
    )
    kept_every: int | None = Field(
        None, ge=1, lt=2**31, description="report what is kept every N tokens and at the end"
    )
    metadata: dict[str, str] | None = Field(None, max_length=16, description="ignored")

    # llama.cpp's fields, accepted only with values that have no effect.
    min_keep: Literal[0] | None = None
    n_probs: int | None = Field(None, ge=0, le=0)
    post_sampling_probs: Literal[False] | None = None
    reasoning_format: Literal["auto", "deepseek"] | None = None
    parse_tool_calls: Literal[True] | None = None

    @model_validator(mode="after")
    def _has_one_limit(self) -> GenerationRequest:
        if len(given := self._limits()) > 1:
            names = {"names": " or ".join(given)}
            raise PydanticCustomError("limits", "give either {names}, not both", names)
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens of an output; None: up to the server's limit."""
        [name] = self._limits() or ["max_tokens"]
        limit: int | None = getattr(self, name)
        return limit

    @property
    @abstractmethod
    def n_top(self) -> int | None:
        """How many of the most likely tokens to report; None: no log-probabilities."""

    def _limits(self) -> list[str]:
        names = ("max_tokens", "max_completion_tokens", "n_predict")
        return [name for name in names if name in self.model_fields_set]

    def sampling(self, *, forms: bool = True) -> StreamOptions:
        """The given options of Generator.stream; forms: with the output format.

        Raises ValueError for more than one format.
        """
        given: Any = self.model_dump(include={*Sampling.model_fields}, exclude_unset=True)
        for name, form in self._forms() if forms else ():
            if name in given:
                raise ValueError(
                    "give one of response_format, structured_outputs, guided_*, grammar and "
                    "json_schema"
                )
            given[name] = form
        if "schema" in given and not self._is_strict:
            given["schema"] = supported(given["schema"])
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if self.protect is not None:
            given["protect"] = self.protect
        if not self.draft:
            given["draft"] = False
        options: StreamOptions = given
        return options

    @property
    def has_form(self) -> bool:
        return any(self._forms())

    @property
    def _is_strict(self) -> bool:
        """Whether a schema is taken literally, and refused if it is not supported."""
        form = self.response_format
        is_strict = isinstance(form, JsonSchemaFormat) and form.json_schema.strict is True
        return is_strict or self.guided_json is not None or self.structured_outputs is not None

    def _forms(self) -> Iterator[tuple[str, Any]]:
        """The given output formats as options of Generator.stream."""
        if isinstance(self.response_format, JsonObjectFormat):
            yield "schema", self.response_format.value or self.response_format.schema_
        elif isinstance(self.response_format, JsonSchemaFormat):
            yield "schema", self.response_format.json_schema.schema_
        vllm = self.structured_outputs or StructuredOutputs()
        for name, value in (
            ("schema", vllm.json_),
            ("schema", {"type": "object"} if vllm.json_object else None),
            ("regex", vllm.regex),
            ("choice", vllm.choice),
            ("grammar", vllm.grammar),
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
    """Continue one or several prompts."""

    prompt: Prompts = Field("", description="strings, or token ids")
    max_tokens: TokenLimit | None = Field(16, description="-1: up to the server's limit")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="log-probabilities of the tokens and of the N most likely at each",
    )
    echo: bool = Field(False, description="return the prompt in front of the text")
    best_of: Literal[1] | None = None
    suffix: str | None = Field(
        None, description="the text after the output, for models that fill in the middle"
    )

    @property
    def n_top(self) -> int | None:
        return self.logprobs


class ChatRequest(GenerationRequest):
    """Answer the last message of a conversation."""

    ignored = (*GenerationRequest.ignored, "prediction")
    messages: NonEmptyList[Message]
    max_tokens: TokenLimit | None = Field(
        None, description="-1, and the default: up to the server's limit"
    )
    max_completion_tokens: TokenLimit | None = Field(
        None, description="the newer name of max_tokens"
    )
    logprobs: bool = Field(False, description="return log-probabilities")
    top_logprobs: TopLogprobs = None

    tools: ListOf[ToolDefinition] | None = Field(
        None, description="tools that the model may call, if its chat template supports tools"
    )
    tool_choice: (
        Literal["none", "auto", "required"] | ByType[NamedTool | AllowedToolsChoice] | None
    ) = Field(
        None, description="none: do not show the tools; required, or a tool: the model must call"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    documents: ListOf[dict[str, Any]] | None = Field(
        None, description="passed to the chat template"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables of the chat template, such as enable_thinking"
    )
    reasoning_effort: Effort | None = Field(
        None, description="passed to the chat template; none: enable_thinking is false"
    )

    add_generation_prompt: bool | None = Field(
        None, description="passed to the chat template; false: the prompt does not begin a reply"
    )
    continue_final_message: bool | None = Field(
        None,
        description="continue the last message; default: if it is the assistant's and "
        "add_generation_prompt is not given",
    )

    # OpenAI's fields, accepted only with values that have no effect.
    functions: Empty | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None

    @model_validator(mode="after")
    def _allows_known_tools(self) -> ChatRequest:
        if isinstance(self.tool_choice, AllowedToolsChoice):
            known = [tool.function.name for tool in self.tools or ()]
            for tool in self.tool_choice.allowed_tools.tools:
                if (name := tool.function.name) not in known:
                    raise PydanticCustomError(
                        "allowed_tools",
                        "tool_choice allows {name}, expected one of {known}",
                        {"name": repr(name), "known": ", ".join(known)},
                    )
        return self

    @model_validator(mode="after")
    def _continues_or_begins(self) -> ChatRequest:
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError(
                "continues",
                "give either continue_final_message or add_generation_prompt, not both",
            )
        return self

    @property
    def n_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def continues(self) -> bool:
        """Whether the reply continues the last message."""
        if self.continue_final_message is None and self.add_generation_prompt is None:
            return self.messages[-1].role == "assistant"
        return bool(self.continue_final_message)

    @property
    def must_call(self) -> bool:
        """Whether the reply must be a tool call."""
        choice = self.tool_choice
        if isinstance(choice, AllowedToolsChoice):
            choice = choice.allowed_tools.mode
        return choice not in (None, "none", "auto")

    @property
    def is_constrained(self) -> bool:
        return self.has_form or self.must_call

    @property
    def called_tool(self) -> str | None:
        """The name of the tool that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools in the form of chat templates, as far as tool_choice allows them."""
        tools = self.tools if self.tools and self.tool_choice != "none" else []
        if isinstance(self.tool_choice, AllowedToolsChoice):
            allowed = {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
            tools = [tool for tool in tools if tool.function.name in allowed]
        return [tool.model_dump(exclude_unset=True) for tool in tools]

    def conversation(self) -> dict[str, Any]:
        """The arguments of ChatTemplate.prompt()."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        elif self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.add_generation_prompt is not None:
            variables["add_generation_prompt"] = self.add_generation_prompt
        return {
            "messages": [message.plain() for message in self.messages],
            "tools": self.shown_tools(),
            "documents": self.documents,
            "variables": {**variables, **(self.chat_template_kwargs or {})},
            "continue_final_message": self.continues,
        }
