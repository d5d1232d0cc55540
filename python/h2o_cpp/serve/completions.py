"""POST /v1/completions: continue prompts."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter

from h2o_cpp.reply import Content, Part
from h2o_cpp.serve.endpoint import post
from h2o_cpp.serve.generation_response import EVENTS
from h2o_cpp.serve.logprobs import CompletionTokens
from h2o_cpp.serve.openai_response import OpenAIResponse
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.requests import CompletionRequest, prompt_list
from h2o_cpp.serve.responses import CompletionChoice, CompletionLogprobs, CompletionResponse
from h2o_cpp.serve.service import Service

router = APIRouter()


@post(
    router,
    "/v1/completions",
    CompletionRequest,
    response_model=CompletionResponse,
    responses=EVENTS,
)
def create_completion(service: Service, body: CompletionRequest) -> _Completions:
    """Continue each prompt."""
    outputs = service.submit(
        prompt_list(body.prompt), body, prompt_logprobs=body.echo and body.logprobs is not None
    )
    if not body.echo:
        body.prompt = ""  # may be large
    return _Completions(service, body, outputs)


class _Completions(OpenAIResponse):
    """Choices, each with its prompt in front if the request has `echo`."""

    id_prefix = "cmpl"
    complete_type = chunk_type = CompletionResponse

    def __init__(self, service: Service, body: CompletionRequest, outputs: list[Output]) -> None:
        super().__init__(service, body, outputs)
        self._prompts = prompt_list(body.prompt) if body.echo else []
        self._tokens = []
        if self._logprobs:
            self._tokens = [
                CompletionTokens(self._tokenizer, after=() if body.echo else output.prompt)
                for output in outputs
            ]

    def choice(self, output: Output) -> CompletionChoice:
        return self._choice(output, output.ended.text)

    def delta(self, output: Output, parts: Sequence[Part]) -> CompletionChoice:
        text = "".join(part.text for part in parts if isinstance(part, Content))
        return self._choice(output, text)

    def _choice(self, output: Output, piece: str) -> CompletionChoice:
        echoes = not output.begun and bool(self._prompts)
        return CompletionChoice(
            index=output.index,
            text=self._prompt(output) + piece if echoes else piece,
            logprobs=self._new_logprobs(output, echoes) if self._logprobs else None,
            finish_reason=output.finish_reason,
            kept=self._kept(output),
        )

    def _prompt(self, output: Output) -> str:
        prompt = self._prompts[output.index // self._body.n]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _new_logprobs(self, output: Output, echoes: bool) -> CompletionLogprobs:
        tokens = self._tokens[output.index]
        if echoes:
            tokens.begin(output.prompt[0])
        return tokens.part(output.new_logprobs())
