"""What clients send: OpenAI's fields as far as they are known here, and some of our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from h2o_cpp.generation.request import StreamOptions

# What OpenAI allows, and is only taken where it changes nothing.
_Zero = Annotated[float, Field(ge=0, le=0)]
_One = Annotated[int, Field(ge=1, le=1)]

_Token = Annotated[int, Field(ge=0, lt=2**31)]
# Lists end at their first error: one is reported, and there may be very many.
_Tokens = Annotated[list[_Token], Field(min_length=1, fail_fast=True)]

UNKNOWN_FIELD = "unknown_field"  # the type of that error

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repeat_penalty",
    "repeat_last_n",
    "stop",
    "ignore_eos",
)


class _Schema(BaseModel):
    """Fields that are not known are refused: they would have been meant to change something."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Clients send null for what they do not set."""
        if not isinstance(values, dict):
            return values
        for name in values:
            if name not in cls.model_fields:
                raise PydanticCustomError(UNKNOWN_FIELD, "there is no such field", {"name": name})
        return {name: value for name, value in values.items() if value is not None}


class StreamSettings(_Schema):
    """How to stream."""

    include_usage: bool = Field(False, description="end with a chunk that has the usage")


class GenerationRequest(_Schema):
    """What completions and chats have in common. Sampling's defaults are those of Generator."""

    model: str | None = Field(None, description="as /v1/models names it; default: the one there is")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    n: int = Field(
        1, ge=1, description="choices for each prompt, with seeds from seed to seed + n - 1"
    )
    seed: int | None = Field(None, ge=0, lt=2**63, description="for the same output again")
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
        | None
    ) = Field(None, description="strings that end the output, and are not part of it")
    stream: bool = Field(False, description="as server-sent events")
    stream_options: StreamSettings | None = None

    top_k: int | None = Field(None, ge=0, lt=2**31, description="0 is all")
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100, description="1 is none")
    repeat_last_n: int | None = Field(None, ge=-1, lt=2**31)
    ignore_eos: bool | None = Field(None, description="continue after the end-of-text token")
    hh: int | float | None = Field(
        None, gt=0, description="what the cache keeps, a fraction of n_ctx or a number of tokens"
    )
    policy: str | None = Field(None, description="by another policy than h2o, as `window`")
    kept_every: int | None = Field(
        None, ge=1, lt=2**31, description="say what is kept, every so many tokens and at the end"
    )

    user: str | None = Field(None, description="ignored")
    metadata: dict[str, str] | None = Field(None, max_length=16, description="ignored")
    store: bool | None = Field(None, description="ignored")
    frequency_penalty: _Zero | None = None
    presence_penalty: _Zero | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)

    def sampling(self) -> StreamOptions:
        """Those options that were given and are called the same everywhere."""
        given: StreamOptions = {}
        for name in _SAMPLING:
            if (value := getattr(self, name)) is not None:
                given[name] = value  # type: ignore[literal-required]
        return given


class CompletionRequest(GenerationRequest):
    """Continue one prompt or several."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | _Tokens
        | Annotated[list[_Tokens], Field(min_length=1, fail_fast=True)]
    ) = Field(description="strings, or token ids")
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(
        None, ge=0, le=20, description="of the tokens, and of so many of the likeliest at each"
    )
    echo: bool = Field(False, description="give the prompt back in front of the text")
    best_of: _One | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """As a list of prompts, whatever it came as."""
        given: Any = self.prompt
        is_list = isinstance(given, list) and not isinstance(given[0], int)
        prompts: Sequence[str | list[int]] = given if is_list else [given]
        return prompts


class ContentPart(_Schema):
    """Part of a message."""

    type: Literal["text"]
    text: str


class Message(_Schema):
    """A message of the conversation."""

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]

    def plain(self) -> dict[str, str]:
        """As a chat template takes it."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatRequest(GenerationRequest):
    """Answer the last message of a conversation."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1, description="default: as many as may be")
    max_completion_tokens: int | None = Field(None, ge=1, description="max_tokens, newer name")
    logprobs: bool = Field(False, description="log-probabilities of the answer's tokens")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="of the likeliest at each")
