"""POST /v1/completions: continue prompts."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from h2o_cpp.serve.answer import Answer
from h2o_cpp.serve.dependencies import ServiceOf
from h2o_cpp.serve.logprobs import CompletionTokens
from h2o_cpp.serve.requests import CompletionRequest
from h2o_cpp.serve.responses import CompletionChoice, CompletionLogprobs, CompletionResponse, Usage
from h2o_cpp.serve.service import Service
from h2o_cpp.serve.streaming import EVENTS
from h2o_cpp.serve.texts import ServedText

router = APIRouter()


@router.post("/v1/completions", response_model=CompletionResponse, responses=EVENTS)
async def create_completion(
    body: CompletionRequest, request: Request, service: ServiceOf
) -> object:
    """Continue each prompt."""
    texts = await run_in_threadpool(_submit, service, body)
    return await _Completions(service, body, texts).send(request)


def _submit(service: Service, body: CompletionRequest) -> list[ServedText]:
    return service.submit(
        body.prompts(),
        body,
        max_tokens=body.max_tokens,
        n_top=body.logprobs,
        prompt_logprobs=body.echo and body.logprobs is not None,
    )


class _Completions(Answer):
    """Texts, each after its prompt if the request says echo."""

    id_prefix = "cmpl"

    def __init__(self, service: Service, body: CompletionRequest, texts: list[ServedText]) -> None:
        super().__init__(service, body, texts)
        self._logprobs = body.logprobs is not None
        self._prompts = body.prompts() if body.echo else []
        self._tokens = [
            CompletionTokens(self._tokenizer, after=() if body.echo else text.prompt)
            for text in texts
        ]

    def whole(self, texts: list[ServedText], usage: Usage) -> CompletionResponse:
        """A choice for each sequence."""
        return self._response([self._choice(text, text.ended.text) for text in texts], usage)

    def chunk(self, text: ServedText, piece: str) -> CompletionResponse:
        """A choice of its own."""
        return self._response([self._choice(text, piece)])

    def last_chunk(self, usage: Usage) -> CompletionResponse:
        """Without choices."""
        return self._response([], usage)

    def _response(
        self, choices: list[CompletionChoice], usage: Usage | None = None
    ) -> CompletionResponse:
        return CompletionResponse(**self._head, choices=choices, usage=usage)

    def _choice(self, text: ServedText, piece: str) -> CompletionChoice:
        echoes = self._begins(text) and bool(self._prompts)
        return CompletionChoice(
            index=text.index,
            text=self._prompt(text) + piece if echoes else piece,
            logprobs=self._new_logprobs(text, echoes) if self._logprobs else None,
            finish_reason=text.finish_reason,
            kept=self._kept[text.index].new(),
        )

    def _prompt(self, text: ServedText) -> str:
        prompt = self._prompts[text.index // self._body.n]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _new_logprobs(self, text: ServedText, echoes: bool) -> CompletionLogprobs:
        tokens = self._tokens[text.index]
        if echoes:
            tokens.begin(text.prompt[0])
        return tokens.part(text.new_logprobs())
