"""What clients get: OpenAI's objects, and what is kept (`kept`, `h2o`) beside them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from h2o_cpp import __version__

FinishReason = Literal["stop", "length", "tool_calls"]

_IF_THERE: Any = Field(default=None, exclude_if=lambda value: value is None)


class ResponseHead(BaseModel):
    """What every response begins with."""

    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str = f"h2o-cpp-{__version__}"


class PromptTokensDetails(BaseModel):
    """What a prompt has cost."""

    cached_tokens: int = Field(description="that did not have to be read again")


class Usage(BaseModel):
    """Tokens of a request; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PolicyCounts(BaseModel):
    """What is kept of each sequence, in tokens; of several layers' policies, the first's."""

    sinks: int
    heavy: int
    recent: int | None  # None: all are kept


class KeptTokens(BaseModel):
    """What the cache keeps of a sequence at one moment."""

    tokens_seen: int
    tokens_kept: int  # in the layer that keeps most
    policy: PolicyCounts
    shares: list[float]  # of each token seen: of all KV heads, those that keep it
    begin: int  # `pieces` are those from this token on; those before were in earlier chunks
    pieces: list[str]


class CompletionLogprobs(BaseModel):
    """Of each token; None for the first of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # in the choice's text


class CompletionChoice(BaseModel):
    """One choice, or in a stream a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    kept: KeptTokens | None = _IF_THERE


class CompletionResponse(ResponseHead):
    """Texts, or in a stream pieces of them."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = _IF_THERE


class TopLogprob(BaseModel):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """The token that was chosen, and the likeliest."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of each token."""

    content: list[ChatTokenLogprob]


class CalledFunction(BaseModel):
    """A tool's name, and what it is called with: a JSON object as text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledFunctionDelta(BaseModel):
    """The name in the first piece, and a piece of the arguments in each."""

    name: str | None = _IF_THERE
    arguments: str


class ToolCallDelta(BaseModel):
    """A piece of a call; id and type are in the first."""

    index: int
    id: str | None = _IF_THERE
    type: Literal["function"] | None = _IF_THERE
    function: CalledFunctionDelta


class ChatMessage(BaseModel):
    """What the model says; no content if it only calls tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = _IF_THERE
    tool_calls: list[ToolCall] | None = _IF_THERE


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    kept: KeptTokens | None = _IF_THERE


class ChatResponse(ResponseHead):
    """Answers."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """What a chunk adds."""

    role: Literal["assistant"] | None = _IF_THERE
    content: str | None = _IF_THERE
    reasoning_content: str | None = _IF_THERE
    tool_calls: list[ToolCallDelta] | None = _IF_THERE


class ChatChunkChoice(BaseModel):
    """A piece of an answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    kept: KeptTokens | None = _IF_THERE


class ChatChunk(ResponseHead):
    """Pieces of answers."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = _IF_THERE


class ModelLimits(BaseModel):
    """What OpenAI's object does not say of a model."""

    n_ctx: int
    endless: bool  # whether max_tokens may be more than n_ctx
    chat: bool  # whether there is a chat template
    policy: PolicyCounts
    n_sequences: int  # that are computed at once
    cache_bytes: int  # of one text
    full_cache_bytes: int  # what a full cache of n_ctx tokens would take


class Model(BaseModel):
    """A model that is served; h2o: if it is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "h2o-cpp"
    h2o: ModelLimits | None = _IF_THERE


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """Whether requests are answered."""

    status: Literal["ok"] = "ok"


class ErrorDetail(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """What every answer but 2xx is."""

    error: ErrorDetail
