"""OpenAI's response objects, extended by what the cache keeps (`kept`, `h2o`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from h2o_cpp import __version__
from h2o_cpp.budget.policy import Policy, each
from h2o_cpp.generation.prompt_memory import PromptMemory
from h2o_cpp.serve.chat_messages import ToolCall
from h2o_cpp.serve.timings import PromptProgress, Timings

MessageMemory = Sequence[float | None]  # for each message, the share that is not evicted
FinishReason = Literal["stop", "length", "tool_calls"]

BUILD = f"b{__version__}-h2o-cpp"  # in the form of llama-server's

IF_THERE: Any = Field(default=None, exclude_if=lambda value: value is None)


class ResponseHead(BaseModel):
    """Fields that every response starts with."""

    id: str
    created: int  # Unix time, seconds
    model: str
    system_fingerprint: str = BUILD


class PromptTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(description="tokens from the prefix cache")


class CompletionTokensDetails(BaseModel):
    """Details of the generated tokens."""

    reasoning_tokens: int


class LostTokens(BaseModel):
    """Tokens of prompts that the cache does not hold; only numbers, as clients add up usage."""

    dropped_tokens: int
    evicted_tokens: int
    archived_tokens: int

    @staticmethod
    def of(*memories: PromptMemory) -> LostTokens:
        """The sums."""
        return LostTokens(
            dropped_tokens=sum(memory.dropped_tokens for memory in memories),
            evicted_tokens=sum(memory.evicted_tokens for memory in memories),
            archived_tokens=sum(memory.archived_tokens for memory in memories),
        )


class Usage(BaseModel):
    """Token counts. A prompt counts once, regardless of the number of choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    prompt_memory: LostTokens


class PolicyCounts(BaseModel):
    """The tokens kept of each sequence; for several policies, the first layer's."""

    sinks: int
    heavy: int
    recent: int | None  # None: all tokens

    @staticmethod
    def of(policy: Policy | Sequence[Policy]) -> PolicyCounts:
        """Makes it from a policy; from a list, that of the first layer."""
        first = each(policy)[0]
        return PolicyCounts(sinks=first.n_sinks, heavy=first.n_heavy, recent=first.n_recent)


class KeptTokens(BaseModel):
    """The tokens that the cache keeps of a sequence at one moment."""

    tokens_seen: int
    tokens_kept: int  # in the layer that keeps most
    policy: PolicyCounts
    shares: list[float]  # [tokens_seen], the share of KV heads that keep each token
    # [tokens_seen], with an archive: the share of its KV heads that recalled each token since the
    # report before
    recalls: list[float] | None = IF_THERE
    begin: int  # the first token in `pieces`; earlier chunks have those before it
    pieces: list[str]


class CompletionLogprobs(BaseModel):
    """Log-probabilities per token; None for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # offset in the choice's text


class CompletionChoice(BaseModel):
    """A choice; in a stream, a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    kept: KeptTokens | None = IF_THERE


class CompletionResponse(ResponseHead):
    """A completion; in a stream, a chunk."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = IF_THERE  # in a stream only in the last chunk, if requested
    prompt_progress: PromptProgress | None = IF_THERE  # in a stream, if requested
    timings: Timings | None = IF_THERE  # of the first output; in a stream in its last chunk


class TopLogprob(BaseModel):
    """A token and its log-probability."""

    id: int | None = IF_THERE
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """The chosen token and the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities per token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunctionDelta(BaseModel):
    """The name, in the first piece, and a piece of the arguments."""

    name: str | None = IF_THERE
    arguments: str


class ToolCallDelta(BaseModel):
    """A piece of a tool call; the first one has id and type."""

    index: int
    id: str | None = IF_THERE
    type: Literal["function"] | None = IF_THERE
    function: CalledFunctionDelta


class ChatMessage(BaseModel):
    """The assistant's message; content is null if it only calls tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = IF_THERE
    tool_calls: list[ToolCall] | None = IF_THERE


class ChatChoice(BaseModel):
    """One reply."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    kept: KeptTokens | None = IF_THERE


class ChatResponse(ResponseHead):
    """A chat completion."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings
    message_memory: MessageMemory | None = IF_THERE


class ChatDelta(BaseModel):
    """The part of a message that a chunk adds; the first chunk adds only the role."""

    role: Literal["assistant"] | None = IF_THERE
    content: str | None = IF_THERE
    reasoning_content: str | None = IF_THERE
    tool_calls: list[ToolCallDelta] | None = IF_THERE


class ChatChunkChoice(BaseModel):
    """A piece of a reply; the last one has no text."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    kept: KeptTokens | None = IF_THERE


class ChatChunk(ResponseHead):
    """A chunk of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = IF_THERE  # in the last chunk, if requested
    prompt_progress: PromptProgress | None = IF_THERE  # if requested
    timings: Timings | None = IF_THERE  # of the first output; in a stream in its last chunk
    message_memory: MessageMemory | None = IF_THERE  # with usage


class ModelLimits(BaseModel):
    """Properties of a model beyond OpenAI's fields."""

    n_ctx: int
    endless: bool  # whether max_tokens may be more than n_ctx
    chat: bool  # whether there is a chat template
    policy: PolicyCounts
    has_archive: bool  # of evicted tokens, which can be recalled
    n_sequences: int  # decoded at once
    cache_bytes: int  # per sequence
    full_cache_bytes: int  # of a full cache of n_ctx tokens


class Model(BaseModel):
    """A served model; h2o: only if it is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "h2o-cpp"
    h2o: ModelLimits | None = IF_THERE


class ModelList(BaseModel):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[Model]


class InputTokens(BaseModel):
    """The number of tokens of a conversation."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class Health(BaseModel):
    """The status of a server that accepts requests."""

    status: Literal["ok"] = "ok"
