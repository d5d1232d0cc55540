"""llama.cpp's /completion and /infill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, Field, RootModel

from h2o_cpp.generation.sampling import NUMBERS, default
from h2o_cpp.serve.endpoint import post
from h2o_cpp.serve.errors import ERRORS
from h2o_cpp.serve.generation_response import EVENTS, GenerationResponse, sse
from h2o_cpp.serve.logprobs import chat_logprobs
from h2o_cpp.serve.openai_requests import (
    GenerationRequest,
    Prompts,
    Token,
    TokenLimit,
    prompt_list,
)
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.schema import Empty, ListOf, NonEmptyList, Tolerant
from h2o_cpp.serve.service import Service
from h2o_cpp.serve.timings import Timings

router = APIRouter(responses=ERRORS)


class PromptObject(Tolerant):
    """A text in the form that may have images too."""

    prompt_string: str
    multimodal_data: Empty | None = None


_Parts = NonEmptyList[Token | str]  # of one prompt
_Prompts = Prompts | PromptObject | _Parts | NonEmptyList[str | PromptObject | _Parts]


def _bias_by_name(given: Any) -> Any:
    """A list of pairs as an object; false, which bans a token, as a number."""
    if isinstance(given, list) and all(isinstance(one, list) and len(one) == 2 for one in given):
        given = {str(token): bias for token, bias in given}
    if isinstance(given, dict):
        return {token: -100 if bias is False else bias for token, bias in given.items()}
    return given


class LlamaCppRequest(Tolerant, GenerationRequest):
    """Continue one or several prompts. Unknown fields are ignored, as in llama.cpp."""

    prompt: _Prompts = Field("", description="strings, token ids, lists of both, or objects")
    max_tokens: TokenLimit | None = Field(None, description="-1: up to the server's limit")
    n_probs: int | None = Field(
        None, ge=0, le=100, description="log-probabilities of the N most likely tokens"
    )
    return_tokens: bool = Field(False, description="return the ids; a stream always does")
    response_fields: ListOf[str] | None = Field(
        None, description="only these fields; a/b is field b of a"
    )
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, BeforeValidator(_bias_by_name)
    ] = Field(
        None,
        max_length=1024,
        description="added to the logits, by token id, or of each token of a text; also as pairs",
    )

    @property
    def n_top(self) -> int | None:
        return self.n_probs or None


class ExtraFile(Tolerant):
    """Another file of the project."""

    filename: str = "tmp"
    text: str


def _without_infill(names: Any) -> Any:
    return [name for name in names if name != "infill"] if isinstance(names, list) else names


class InfillRequest(LlamaCppRequest):
    """Write the text between a prefix and a suffix."""

    prompt: str = Field("", description="the prefix's last part")
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: ListOf[ExtraFile] | None = None
    n_predict: Annotated[TokenLimit | None, BeforeValidator(lambda n: 1 if n == 0 else n)] = None
    samplers: Annotated[
        list[str] | Literal["llama.cpp"] | None, BeforeValidator(_without_infill)
    ] = Field(None, max_length=16, description="of llama.cpp's, infill is ignored")


class LlamaCppCompletion(BaseModel):
    """A completion, or the requested fields; in a stream, a piece: the last one has all fields."""

    model_config = {"extra": "allow"}


class LlamaCppCompletions(RootModel[list[LlamaCppCompletion]]):
    """A completion for each prompt."""


@post(
    router,
    "/completion",
    LlamaCppRequest,
    response_model=LlamaCppCompletion | LlamaCppCompletions,
    responses=EVENTS,
)
@post(router, "/completions", LlamaCppRequest, include_in_schema=False)
def complete(service: Service, body: LlamaCppRequest) -> _Completions:
    """Continue each prompt, with llama.cpp's form of answers."""
    with service.refusals():
        prompts = [_tokens(service, prompt) for prompt in _prompts(body.prompt)]
    _resolve_biases(service, body)
    return _Completions(service, body, service.submit(prompts, body))


@post(router, "/infill", InfillRequest, response_model=LlamaCppCompletion, responses=EVENTS)
def infill(service: Service, body: InfillRequest) -> _Completions:
    """Write the text between a prefix and a suffix, as editors ask for it."""
    files = [(one.filename, one.text) for one in body.input_extra or ()]
    prefix = body.input_prefix + body.prompt
    _resolve_biases(service, body)
    outputs = service.fill_in(prefix, body.input_suffix, body, files=files)
    return _Completions(service, body, outputs)


def _prompts(given: Any) -> Sequence[Any]:
    """The prompts; a list of strings is several, unless it has token ids too."""
    if isinstance(given, list) and all(isinstance(one, int | str) for one in given):
        return [given] if any(isinstance(one, int) for one in given) else given
    return prompt_list(given)


def _tokens(service: Service, prompt: Any) -> str | list[int]:
    if isinstance(prompt, PromptObject):
        return prompt.prompt_string
    if isinstance(prompt, str) or all(isinstance(part, int) for part in prompt):
        tokens: str | list[int] = prompt
        return tokens
    encode = service.generator.tokenizer
    parts = encode.encode_chat if isinstance(prompt[0], str) else encode.encode_parts
    return parts(prompt, most=service.max_prompt)


def _resolve_biases(service: Service, body: LlamaCppRequest) -> None:
    """Replaces texts by the ids of their tokens."""
    if body.logit_bias is not None:
        encode = service.generator.tokenizer.encode
        body.logit_bias = {
            str(token): bias
            for name, bias in body.logit_bias.items()
            for token in ([int(name)] if name.isdecimal() else encode(name, add_special=False))
        }


def generation_settings(service: Service, body: LlamaCppRequest | None = None) -> dict[str, Any]:
    """The options of an output by llama.cpp's names; without a body, the defaults."""
    given: dict[str, Any] = {**service.defaults.sampling}
    if body is not None:
        given |= body.sampling(forms=False)
    limit = None if body is None else body.limit
    n_predict = min(service.max_tokens, limit or service.max_tokens)
    ignore_eos = given.get("ignore_eos", False)
    banned = service.generator.tokenizer.end_tokens if ignore_eos else ()
    biases = {**given.get("logit_bias", {}), **dict.fromkeys(sorted(banned))}
    return {
        **{name: default(name) for name in NUMBERS},
        **given,
        "seed": -1 if given.get("seed") is None else given["seed"],
        "n_predict": n_predict,
        "max_tokens": n_predict,
        "stop": body.stop or [] if body is not None else [],
        "stream": body is not None and body.stream,
        "ignore_eos": ignore_eos,
        "n_probs": 0 if body is None else body.n_probs or 0,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in biases.items()],
    }


class _Completions(GenerationResponse):
    def __init__(self, service: Service, body: LlamaCppRequest, outputs: list[Output]) -> None:
        super().__init__(outputs, stream=body.stream)
        self._service, self._body = service, body
        self._tokenizer = service.generator.tokenizer
        self._settings = generation_settings(service, body)

    def complete(self, outputs: list[Output]) -> LlamaCppCompletion | LlamaCppCompletions:
        found = [self._completion(output, output.ended.text) for output in outputs]
        return found[0] if len(found) == 1 else LlamaCppCompletions(found)

    def event(self, output: Output, piece: str) -> bytes:
        """A piece, unless it adds nothing."""
        ended = output.generation is not None
        return sse(self._completion(output, piece).model_dump_json()) if piece or ended else b""

    def _completion(self, output: Output, text: str) -> LlamaCppCompletion:
        n_read = output.completion.n_read
        tokens = [*output.completion.tokens[output.n_sent : n_read]]
        output.n_sent = n_read
        found: dict[str, Any] = {
            "index": output.index,
            "content": text,
            "tokens": tokens if self._body.stream or self._body.return_tokens else [],
            "id_slot": -1,
            "stop": output.generation is not None,
            "tokens_predicted": n_read,
            "tokens_evaluated": len(output.prompt),
        }
        if self._body.n_top is not None:
            logprobs = chat_logprobs(self._tokenizer, output.new_logprobs())
            found["completion_probabilities"] = logprobs.content
        if output.generation is not None:
            found |= self._end(output)
        if self._body.response_fields:
            paths = self._body.response_fields
            found = {path: at for path in paths if (at := _at(found, path)) is not None}
        return LlamaCppCompletion.model_validate(found)

    def _end(self, output: Output) -> dict[str, Any]:
        """The fields of the last piece."""
        ended = output.ended
        n_all = len(output.prompt) + ended.completion_tokens
        kind = "limit" if output.finish_reason == "length" else "eos"
        return {
            "model": self._service.name,
            "generation_settings": self._settings,
            "prompt": self._tokenizer.spell(output.prompt),
            "has_new_line": "\n" in ended.text,
            "truncated": output.prompt_parts.n_dropped > 0
            or bool(ended.finish_message)
            or n_all > self._service.generator.n_ctx,
            "stop_type": "word" if ended.stop_string else kind,
            "stopping_word": ended.stop_string,
            "tokens_cached": n_all,
            "timings": Timings.of(output),
        }


def _at(values: Any, path: str) -> Any:
    """A field of a field; None if there is none."""
    for name in path.split("/"):
        values = values.get(name) if isinstance(values, dict) else None
    return values
