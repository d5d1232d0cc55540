"""A served model: from validated requests to outputs of the Engine."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from h2o_cpp import _core
from h2o_cpp.generation.completion import Completion
from h2o_cpp.generation.engine import Engine
from h2o_cpp.generation.record import Record
from h2o_cpp.generation.request import ContextFullError, Pooling
from h2o_cpp.generator import Generator
from h2o_cpp.model.arguments import check_int
from h2o_cpp.model.chat_template import ChatTemplate
from h2o_cpp.model.policy import choose_policy
from h2o_cpp.serve.errors import ApiError, TooLongError, closed, refusal
from h2o_cpp.serve.logprobs import TextOffset
from h2o_cpp.serve.openai_requests import GenerationRequest
from h2o_cpp.serve.openai_responses import Model, ModelLimits, PolicyCounts
from h2o_cpp.serve.outputs import Output, Outputs


class Service:
    """A Generator with a name and limits.

    Attributes: `generator`, `name`, `created` (Unix time in seconds), `template` (None: no chat),
    `architecture` and `sizes` (of the model, by GGUF key), `backend` (as in Stats), and `engine`
    during run().
    """

    engine: Engine

    def __init__(
        self,
        generator: Generator,
        *,
        name: str,
        template: str | None = None,
        tool_parser: str | None = None,
        max_queue: int = 64,
        max_tokens: int | None = None,
        max_prompt: int | None = None,
    ) -> None:
        """Arguments and errors as for create_app."""
        self.generator = generator
        self.name = name
        self.created = int(time.time())
        n_ctx = generator.n_ctx
        self.max_queue = check_int("max_queue", max_queue, 1)
        self.max_tokens = n_ctx if max_tokens is None else check_int("max_tokens", max_tokens, 1)
        self.max_prompt = n_ctx if max_prompt is None else check_int("max_prompt", max_prompt, 1)
        if not generator.endless:
            self.max_prompt = min(self.max_prompt, n_ctx)
        self.template: ChatTemplate | None = None
        if template is not None or generator.tokenizer.chat_template is not None:
            self.template = generator.chat_template(template, tool_parser=tool_parser)
        metadata = _core.GgufFile(str(generator.path)).metadata()
        self.architecture: str = metadata["general.architecture"]
        begin = f"{self.architecture}."
        self.sizes = {
            key: value
            for key, value in metadata.items()
            if key.startswith(begin) and type(value) is int
        }
        stats = generator.stats()
        self.backend = stats.backend
        self.limits = ModelLimits(
            n_ctx=generator.n_ctx,
            endless=generator.endless and self.max_tokens > generator.n_ctx,
            chat=self.template is not None,
            policy=PolicyCounts.of(generator.policy),
            n_sequences=generator.max_sequences,
            cache_bytes=stats.cache_bytes // stats.n_sequences,
            full_cache_bytes=stats.full_cache_bytes // stats.n_sequences,
        )
        self.model = Model(id=name, created=self.created, h2o=self.limits)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Run an Engine; on exit, cancel unfinished requests."""
        with self.generator.engine(max_queue=self.max_queue) as self.engine:
            yield

    def submit(
        self,
        prompts: Sequence[str | list[int]],
        body: GenerationRequest,
        *,
        prompt_logprobs: bool = False,
        spelled: Sequence[int] = (),
        grammar: str | None = None,
        around_form: str | None = None,
    ) -> list[Output]:
        """Submit `body.n` outputs for each prompt, all or none, without blocking.

        spelled: special tokens to include in the text; grammar: of the outputs, instead of the
        body's format; around_form: as for Engine.submit.

        Raises ApiError if the Engine rejects a request, a limit is exceeded or the queue is full.
        """
        max_tokens = self.max_tokens if body.limit is None else body.limit
        if max_tokens > self.max_tokens:
            raise ApiError(
                400,
                f"max_tokens is {max_tokens}, expected at most {self.max_tokens} (the server's "
                "--max-tokens)",
            )
        if len(prompts) * body.n > self.max_queue:
            raise ApiError(
                400,
                f"the request has {len(prompts) * body.n} outputs, expected at most "
                f"{self.max_queue} outputs",
            )
        with _submitting() as outputs:
            policy = None  # the Generator's
            if body.hh is not None or body.policy is not None:
                policy = choose_policy(body.hh, None, body.policy, self.generator.n_ctx)
            options = body.sampling(forms=grammar is None)
            options["max_tokens"] = max_tokens
            if grammar is not None:
                options["grammar"] = grammar
            for given in prompts:
                prompt = self._tokens(given)
                for i in range(body.n):
                    if body.seed is not None:
                        options["seed"] = (body.seed + i) % 2**64
                    record = Record(
                        n_top=body.n_top, prompt=prompt_logprobs, kept_every=body.kept_every
                    )
                    completion = self.engine.submit(
                        prompt,
                        policy=policy,
                        record=record,
                        spelled=spelled,
                        around_form=around_form,
                        timeout=0,
                        **options,
                    )
                    kept = policy or self.generator.policy
                    offset = None
                    if body.n_top is not None:
                        offset = TextOffset(self.generator.tokenizer, prompt, spelled)
                    outputs.append(Output(len(outputs), prompt, completion, record, kept, offset))
        return outputs

    def embed(
        self, texts: Sequence[str | list[int]], pooling: Pooling, *, truncate: bool = False
    ) -> Outputs:
        """Submit embeddings, of which only some wait in the queue at a time.

        truncate: cut strings that are too long. Raises as submit() does.
        """
        prompts = []
        for i, text in enumerate(texts):
            if not text:
                raise ApiError(400, f"input[{i}] is empty", param="input")
            if truncate and isinstance(text, str):
                prompts.append(self._first_tokens(text))
            else:
                prompts.append(self._tokens(text))

        def output(i: int, completion: Completion) -> Output:
            return Output(i, prompts[i], completion, Record(), self.generator.policy)

        async def submit_later(i: int) -> Output:
            with _submitting():
                return output(i, await self.engine.submit_async(prompts[i], pooling=pooling))

        n = min(len(prompts), self.max_queue, 2 * self.generator.max_sequences)
        with _submitting() as outputs:
            for i in range(n):
                completion = self.engine.submit(prompts[i], pooling=pooling, timeout=0)
                outputs.append(output(i, completion))
        return Outputs(outputs, [partial(submit_later, i) for i in range(n, len(prompts))])

    def chat_template(self, *, tools: bool = False) -> ChatTemplate:
        """The chat template; tools: whether it must support tools. Raises ApiError."""
        if self.template is None:
            raise ApiError(400, "the model has no chat template; use /v1/completions")
        if tools and not self.template.has_tools:
            raise ApiError(400, "the chat template does not support tools", param="tools")
        if tools and self.template.format.parse is None:
            message = "the model's format of tool calls is unknown; start with --tool-parser"
            raise ApiError(400, message, param="tools")
        return self.template

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn errors of prompts and options into ApiErrors."""
        try:
            yield
        except ContextFullError:
            raise self._too_long() from None
        except ValueError as error:
            raise refusal(error) from error

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            with self.refusals():
                return self.generator.tokenizer.encode(prompt, most=self.max_prompt)
        if len(prompt) > self.max_prompt:
            raise self._too_long()
        return prompt

    def _first_tokens(self, text: str) -> list[int]:
        """The tokens of a text that fit, without computing all those of a long text."""
        generator = self.generator
        n_characters = most = self.max_prompt
        with self.refusals():
            while n_characters < len(text):
                try:
                    generator.tokenizer.encode(text[:n_characters], most=most)
                except ContextFullError:
                    break
                n_characters *= 2
            # Twice as many, because the last tokens depend on the text after them.
            return generator.tokenizer.encode(text[: 2 * n_characters])[:most]

    def _too_long(self) -> TooLongError:
        most = self.max_prompt
        message = f"the prompt has more than {most} tokens, the server's --max-prompt"
        if most == self.generator.n_ctx:  # in OpenAI's words, which clients compare
            message = (
                f"This model's maximum context length is {most} tokens (n_ctx). However, your "
                f"prompt has more than {most} tokens"
            )
        return TooLongError(message, most)


@contextmanager
def _submitting() -> Iterator[list[Output]]:
    """A list for outputs, which an error cancels; it becomes an ApiError."""
    outputs: list[Output] = []
    try:
        try:
            yield outputs
        except BaseException:
            Outputs(outputs).close()
            raise
    except ValueError as error:
        raise refusal(error) from error
    except ImportError as error:  # llguidance is missing
        raise ApiError(501, str(error)) from error
    except queue.Full as full:
        raise ApiError(429, f"{full}; try again later", code="queue_full") from None
    except RuntimeError as error:
        raise closed() from error
