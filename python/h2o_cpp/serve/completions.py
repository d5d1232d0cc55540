"""POST /v1/completions and /v1/chat/completions: OpenAI's choices, complete or in chunks."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from pydantic import BaseModel

from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.model.visible_pieces import VisiblePieces
from h2o_cpp.reply import CallDelta, Content, Part, Reasoning
from h2o_cpp.serve.chat_messages import CalledFunction, ToolCall
from h2o_cpp.serve.conversation import count_tokens, submit_chat
from h2o_cpp.serve.endpoint import post
from h2o_cpp.serve.errors import ERRORS, ApiError
from h2o_cpp.serve.generation_response import EVENTS, GenerationResponse, sse
from h2o_cpp.serve.logprobs import CompletionTokens, chat_logprobs
from h2o_cpp.serve.openai_requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    prompt_list,
)
from h2o_cpp.serve.openai_responses import (
    CalledFunctionDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    CompletionChoice,
    CompletionResponse,
    CompletionTokensDetails,
    FinishReason,
    InputTokens,
    KeptTokens,
    LostTokens,
    PolicyCounts,
    PromptTokensDetails,
    ResponseHead,
    ToolCallDelta,
    Usage,
)
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.service import Service
from h2o_cpp.serve.timings import PromptProgress, Timings

_PIECE = "\ufdd0"  # placeholder for a piece of text; a Unicode noncharacter

router = APIRouter(responses=ERRORS)


@post(
    router,
    "/v1/completions",
    CompletionRequest,
    response_model=CompletionResponse,
    responses=EVENTS,
)
def create_completion(service: Service, body: CompletionRequest) -> _Completions:
    """Continue each prompt, or a single one up to the suffix."""
    prompts = prompt_list(body.prompt)
    if body.suffix:
        if len(prompts) != 1:
            raise ApiError(400, "suffix is given, expected one prompt", param="suffix")
        outputs = service.fill_in(prompts[0], body.suffix, body)
    else:
        logs_prompt = body.echo and body.logprobs is not None
        outputs = service.submit(prompts, body, prompt_logprobs=logs_prompt)
    if not body.echo:
        body.prompt = ""  # may be large
    return _Completions(service, body, outputs)


@post(
    router,
    "/v1/chat/completions",
    ChatRequest,
    response_model=ChatResponse,
    responses=EVENTS,
    quick=False,
)
def create_chat_completion(service: Service, body: ChatRequest) -> _Chat:
    """Answer the last message."""
    return _Chat(service, body, submit_chat(service, body))


@post(
    router,
    "/v1/chat/completions/input_tokens",
    ChatRequest,
    response_model=InputTokens,
    quick=False,
)
def count_input_tokens(service: Service, body: ChatRequest) -> InputTokens:
    """Count the tokens of a conversation."""
    return InputTokens(input_tokens=count_tokens(service, body))


class _Choices(GenerationResponse):
    """A choice per output. A stream ends with [DONE] unless it failed."""

    id_prefix: str  # of responses
    complete_type: type[BaseModel]  # of a response with all choices
    chunk_type: type[BaseModel]  # of its parts in a stream

    def __init__(self, service: Service, body: GenerationRequest, outputs: list[Output]) -> None:
        super().__init__(outputs, stream=body.stream)
        self._body = body
        self._logprobs = body.n_top is not None
        settings = body.stream_options
        self._streams_usage = settings is not None and settings.include_usage
        self._tokenizer = service.generator.tokenizer
        self._views: list[_CacheView] = []
        if body.kept_every is not None:
            self._views = [_CacheView(self._tokenizer, output) for output in outputs]
        self._plain: dict[int, list[bytes]] = {}  # by output: a chunk, split at its text
        # The first fields of every chunk.
        self._head = ResponseHead(
            id=f"{self.id_prefix}-{uuid4().hex}", created=int(time.time()), model=service.name
        ).model_dump()

    @abstractmethod
    def choice(self, output: Output) -> BaseModel:
        """The choice of a finished output."""

    @abstractmethod
    def delta(self, output: Output, parts: Sequence[Part]) -> BaseModel:
        """The choice of a chunk, with new parts of an output, or with the reason of its end."""

    def first(self, output: Output) -> bytes:
        """A chunk before all others of an output."""
        return b""

    def complete(self, outputs: list[Output]) -> BaseModel:
        choices = [self.choice(output) for output in outputs]
        return self.complete_type(**self._head, choices=choices, **self._ending())

    def event(self, output: Output, piece: str) -> bytes:
        """The chunks for a piece; the last one has the reason of the end, and no text."""
        parts = output.parts(piece, deltas=True)
        ended = output.generation is not None
        event = b"" if output.begun else self.first(output)
        if parts or (not ended and (self._logprobs or self._views)):
            event += self._parts_event(output, parts, plain=not ended)
            output.begun = True
        if ended:
            times = None if self._streams_usage else Timings.of(output)
            event += self._chunk([self.delta(output, [])], timings=times)
        return event

    def _parts_event(self, output: Output, parts: list[Part], *, plain: bool) -> bytes:
        plain = plain and output.begun and not (self._logprobs or self._views)
        if plain and len(parts) == 1 and isinstance(part := parts[0], Content):
            return self._plain_event(output, part.text)
        return self._chunk([self.delta(output, parts)])

    def _plain_event(self, output: Output, text: str) -> bytes:
        around = self._plain.get(output.index)
        if around is None:  # chunks differ only in the text
            around = self._chunk([self.delta(output, [Content(_PIECE)])]).split(_PIECE.encode())
            self._plain[output.index] = around
        return json.dumps(text)[1:-1].encode().join(around)

    def end(self) -> bytes:
        """The usage chunk, if requested, and [DONE]."""
        if not self._streams_usage:
            return sse("[DONE]")
        return self._chunk([], **self._ending()) + sse("[DONE]")

    def ping(self) -> bytes:
        """How much of the first prompt was read, if requested."""
        output = self._outputs.all[0]
        if output.begun or not self._body.return_progress:
            return super().ping()
        return self._chunk([], prompt_progress=PromptProgress.of(output))

    def _chunk(self, choices: list[BaseModel], **more: Any) -> bytes:
        return sse(self.chunk_type(**self._head, choices=choices, **more).model_dump_json())

    def _kept(self, output: Output) -> KeptTokens | None:
        return self._views[output.index].new() if self._views else None

    def _ending(self) -> dict[str, Any]:
        """The fields that are known at the end."""
        first = self._outputs.all[0]
        return {
            "usage": self._usage(),
            "timings": Timings.of(first),
            "message_memory": first.message_memory,
        }

    def _usage(self) -> Usage:
        outputs = self._outputs.all
        first = outputs[:: self._body.n]  # one of each prompt
        n_prompt = sum(len(output.prompt) for output in first)
        n = sum(output.ended.completion_tokens for output in outputs)
        n_cached = sum(output.ended.cached_tokens for output in first)
        n_reasoning = sum(output.count_reasoning(self._tokenizer) for output in outputs)
        return Usage(
            prompt_tokens=n_prompt,
            completion_tokens=n,
            total_tokens=n_prompt + n,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=n_cached),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=n_reasoning),
            prompt_memory=LostTokens.of(*(output.prompt_memory for output in first)),
        )


class _Completions(_Choices):
    """Choices, each with its prompt in front if the request has `echo`."""

    id_prefix = "cmpl"
    complete_type = chunk_type = CompletionResponse

    def __init__(self, service: Service, body: CompletionRequest, outputs: list[Output]) -> None:
        super().__init__(service, body, outputs)
        self._prompts = prompt_list(body.prompt) if body.echo else []
        self._tokens = []
        if self._logprobs:
            self._tokens = [
                CompletionTokens(self._tokenizer, output.prompt, echo=body.echo)
                for output in outputs
            ]

    def choice(self, output: Output) -> CompletionChoice:
        return self._choice(output, output.ended.text, output.finish_reason)

    def delta(self, output: Output, parts: Sequence[Part]) -> CompletionChoice:
        text = "".join(part.text for part in parts if isinstance(part, Content))
        return self._choice(output, text, None if parts else output.finish_reason)

    def _choice(
        self, output: Output, piece: str, finish_reason: FinishReason | None
    ) -> CompletionChoice:
        echoes = not output.begun and bool(self._prompts)
        logprobs = None
        if self._logprobs:
            logprobs = self._tokens[output.index].part(output.new_logprobs())
        return CompletionChoice(
            index=output.index,
            text=self._prompt(output) + piece if echoes else piece,
            logprobs=logprobs,
            finish_reason=finish_reason,
            kept=self._kept(output),
        )

    def _prompt(self, output: Output) -> str:
        prompt = self._prompts[output.index // self._body.n]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)


class _Chat(_Choices):
    id_prefix = "chatcmpl"
    complete_type = ChatResponse
    chunk_type = ChatChunk

    def choice(self, output: Output) -> ChatChoice:
        output.parts(output.ended.text)
        reply = output.reply
        calls = [
            ToolCall(
                id=output.call_id(i),
                function=CalledFunction(name=call.name, arguments=call.arguments),
            )
            for i, call in enumerate(reply.calls)
        ]
        return ChatChoice(
            index=output.index,
            message=ChatMessage(
                content=None if calls and not reply.content else reply.content,
                reasoning_content=reply.reasoning or None,
                tool_calls=calls or None,
            ),
            logprobs=self._new_logprobs(output),
            finish_reason=output.finish_reason,
            kept=self._kept(output),
        )

    def first(self, output: Output) -> bytes:
        output.begun = True
        logprobs = ChatLogprobs(content=[]) if self._logprobs else None
        start = ChatDelta(role="assistant")
        return self._chunk([ChatChunkChoice(index=output.index, delta=start, logprobs=logprobs)])

    def delta(self, output: Output, parts: Sequence[Part]) -> ChatChunkChoice:
        content = [part.text for part in parts if isinstance(part, Content)]
        reasoning = [part.text for part in parts if isinstance(part, Reasoning)]
        calls = [_delta(output, part) for part in parts if isinstance(part, CallDelta)]
        return ChatChunkChoice(
            index=output.index,
            delta=ChatDelta(
                content="".join(content) or None,
                reasoning_content="".join(reasoning) or None,
                tool_calls=calls or None,
            ),
            logprobs=self._new_logprobs(output),
            finish_reason=None if parts else output.finish_reason,
            kept=self._kept(output),
        )

    def _new_logprobs(self, output: Output) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return chat_logprobs(self._tokenizer, output.new_logprobs())


def _delta(output: Output, part: CallDelta) -> ToolCallDelta:
    begins = part.name is not None
    return ToolCallDelta(
        index=part.index,
        id=output.call_id(part.index) if begins else None,
        type="function" if begins else None,
        function=CalledFunctionDelta(name=part.name, arguments=part.arguments),
    )


def _rounded(shares: NDArray[np.float32]) -> list[float]:
    return [round(share, 3) for share in shares.tolist()]


class _CacheView:
    """The tokens that the cache keeps of one sequence, one observation after another."""

    def __init__(self, tokenizer: Tokenizer, output: Output) -> None:
        self._output = output
        self._pieces = VisiblePieces(tokenizer)
        self._n_pieces = 0

    def new(self) -> KeptTokens | None:
        """The last observation; None if it was already returned."""
        kept = self._output.record.kept
        if kept is None or len(kept.shares) == self._n_pieces:
            return None
        n = len(kept.shares)
        tokens = [*self._output.prompt, *self._output.completion.tokens][self._n_pieces : n]
        begin, self._n_pieces = self._n_pieces, n
        return KeptTokens(
            tokens_seen=n,
            tokens_kept=kept.tokens_kept,
            policy=PolicyCounts.of(self._output.policy),
            shares=_rounded(kept.shares),
            recalls=_rounded(kept.recalls) or None,
            begin=begin,
            pieces=[self._pieces.push(token) for token in tokens],
        )
