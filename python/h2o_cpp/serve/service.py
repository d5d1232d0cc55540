"""A served model: from validated requests to outputs of the Engine."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from h2o_cpp import _core
from h2o_cpp.arguments import INT32_MAX
from h2o_cpp.budget.policy import Policy, choose_policy
from h2o_cpp.files.visible_text import visible_log
from h2o_cpp.generation.completion import Completion
from h2o_cpp.generation.constraint_process import CompilingError
from h2o_cpp.generation.engine import Engine
from h2o_cpp.generation.lazy_constraint import LazyConstraint
from h2o_cpp.generation.prompt_memory import PromptParts
from h2o_cpp.generation.record import Record
from h2o_cpp.generation.request import ContextFullError, Pooled, Pooling
from h2o_cpp.generation.reranking import pair_prompts
from h2o_cpp.generator import Generator
from h2o_cpp.model.chat_template import ChatTemplate
from h2o_cpp.model.chat_turn import ChatPrompt, ReplyForm
from h2o_cpp.model.infill import Infill
from h2o_cpp.serve.errors import ApiError, TooLongError, closed, refusal
from h2o_cpp.serve.logprobs import TextOffset
from h2o_cpp.serve.openai_requests import GenerationRequest
from h2o_cpp.serve.openai_responses import ModelLimits, PolicyCounts
from h2o_cpp.serve.options import ServiceOptions
from h2o_cpp.serve.outputs import Output, Outputs

_log = visible_log("uvicorn.error")  # the server's log

_DESCRIBED_TOOLS = (
    "%s: the chat template has no known format of tool calls, so tools are described in the system "
    "prompt and calls are JSON in <tool_call>; --tool-parser sets another format"
)


class Service:
    """A Generator with a name and limits.

    Attributes: `generator`, `name`, `created` (Unix time in seconds), `template` (None: no chat),
    `infill` (None: no tokens for it), `defaults`, `architecture` and
    `sizes` (of the model, by GGUF key), `backend` (as in Stats), and `engine` during run().
    """

    engine: Engine

    def __init__(
        self, generator: Generator, *, name: str, options: ServiceOptions | None = None
    ) -> None:
        """Serve a Generator; raises ValueError for an invalid template."""
        options = options or ServiceOptions()
        self.generator = generator
        self.name = name
        self.created = int(time.time())
        n_ctx = generator.n_ctx
        self.max_queue = options.max_queue
        self.max_tokens = options.max_tokens or n_ctx
        self.max_prompt = INT32_MAX if generator.endless else n_ctx
        if options.max_prompt is not None:
            self.max_prompt = min(self.max_prompt, options.max_prompt)
        self.defaults = options.defaults
        self.template: ChatTemplate | None = None
        self._has_described_tools = False  # for any request yet
        if options.template is not None or generator.tokenizer.chat_template is not None:
            self.template = generator.chat_template(
                options.template, tool_parser=options.tool_parser
            )
        metadata = _core.GgufFile(str(generator.path)).metadata()
        self.architecture: str = metadata["general.architecture"]
        begin = f"{self.architecture}."
        self.infill = Infill.of(generator.tokenizer, metadata)
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
            has_archive=generator.has_archive,
            n_sequences=generator.max_sequences,
            cache_bytes=stats.cache_bytes // stats.n_sequences,
            full_cache_bytes=stats.full_cache_bytes // stats.n_sequences,
        )

    @contextmanager
    def run(self) -> Iterator[None]:
        """Run an Engine; on exit, cancel unfinished requests."""
        with self.generator.engine(max_queue=self.max_queue) as self.engine:
            yield

    def submit(
        self,
        prompts: Sequence[str | list[int] | ChatPrompt],
        body: GenerationRequest,
        form: ReplyForm | None = None,
        *,
        prompt_logprobs: bool = False,
    ) -> list[Output]:
        """Submit `body.n` outputs for each prompt, all or none, without blocking.

        form: of the outputs; its grammar replaces the body's form.

        Raises ApiError if the Engine rejects a request, a limit is exceeded or the queue is full.
        """
        form = form or ReplyForm()
        max_tokens = min(self.max_tokens, body.limit or self.max_tokens)
        if len(prompts) * body.n > self.max_queue:
            raise ApiError(
                400,
                f"the request has {len(prompts) * body.n} outputs, expected at most "
                f"{self.max_queue} outputs",
            )
        with _submitting() as outputs:
            policy = self._own_policy(body)
            options = self.defaults.sampling | body.sampling(forms=form.grammar is None)
            options["max_tokens"] = max_tokens
            if form.grammar is not None:
                options["grammar"] = form.grammar
            seed = options.get("seed")
            for given in prompts:
                chat = None
                if isinstance(given, ChatPrompt):
                    chat, given = given, given.tokens
                prompt, n_dropped = self._fitting(given, body)
                if chat is None or n_dropped:
                    chat = ChatPrompt(prompt, thinking=False)
                for i in range(body.n):
                    if seed is not None:
                        options["seed"] = (seed + i) % 2**64
                    record = Record(
                        n_top=body.n_top, prompt=prompt_logprobs, kept_every=body.kept_every
                    )
                    if form.trigger is not None:
                        constraint = LazyConstraint(self.generator.tokenizer, *form.trigger)
                        options["constraint"] = constraint
                    completion = self.engine.submit(
                        prompt,
                        policy=policy,
                        record=record,
                        spelled=form.spelled,
                        around_form=form.around,
                        replies=chat.replies,
                        timeout=0,
                        **options,
                    )
                    kept = policy or self.generator.policy
                    offset = None
                    if body.n_top is not None:
                        offset = TextOffset(self.generator.tokenizer, prompt, form.spelled)
                    output = Output(len(outputs), prompt, completion, record, kept, offset)
                    output.prompt_parts = PromptParts(n_dropped, chat.messages)
                    outputs.append(output)
        return outputs

    def policy_of(self, body: GenerationRequest) -> Policy | Sequence[Policy]:
        """The policy of a request. Raises ValueError for an invalid budget."""
        return self._own_policy(body) or self.generator.policy

    def _own_policy(self, body: GenerationRequest) -> Policy | Sequence[Policy] | None:
        """The policy of a request, or None for the Generator's."""
        if body.hh is None and body.policy is None:
            return None
        name = body.policy or (self.defaults.policy if body.hh is not None else None)
        return choose_policy(body.hh, None, name, self.generator.n_ctx)

    def _fitting(self, prompt: str | list[int], body: GenerationRequest) -> tuple[list[int], int]:
        """The tokens of a prompt that are read, and how many are dropped.

        Of too many, the first `body.n_keep` (-1: most) besides the one that begins a text, and the
        last ones are kept. A quarter of what fits is left for the output.

        Raises ApiError for too many tokens that must not be dropped.
        """
        if (body.truncation or self.defaults.truncation) == "error":
            return self._tokens(prompt, parse_special=True), 0
        tokens = prompt
        if isinstance(tokens, str):
            with self.refusals():
                tokens = self.generator.tokenizer.encode(tokens, parse_special=True)
        if len(tokens) <= self.max_prompt:
            return tokens, 0
        most = max(self.max_prompt * 3 // 4, 1)
        n_first = most - 1
        if body.n_keep >= 0:
            begins = tokens[0] == self.generator.tokenizer.bos
            n_first = min(body.n_keep + begins, most - 1)
        return tokens[:n_first] + tokens[n_first - most :], len(tokens) - most

    def fill_in(
        self,
        prefix: str | list[int],
        suffix: str,
        body: GenerationRequest,
        *,
        files: Sequence[tuple[str, str]] = (),
    ) -> list[Output]:
        """Submit outputs for the text between prefix and suffix; files: as for Infill.prompt().

        Raises as submit() does, and if the model has no tokens for this.
        """
        if self.infill is None or not isinstance(prefix, str):
            got = "the model has no tokens to fill in the middle"
            if self.infill is not None:
                got = "the prompt is token ids, expected text"
            raise ApiError(400, f"suffix is given, but {got}", param="suffix")
        with self.refusals():
            prompt = self.infill.prompt(prefix, suffix, files=files, most=self.max_prompt)
        given = [body.stop] if isinstance(body.stop, str) else body.stop or []
        body.stop = [*given, *self.infill.ends.values()]
        return self.submit([prompt], body, ReplyForm(spelled=[*self.infill.ends]))

    def embed(
        self, texts: Sequence[str | list[int]], chosen: Pooling | None, *, truncate: bool = False
    ) -> Outputs:
        """Submit embeddings.

        chosen: the pooling, or None for the model's. truncate: cut strings that are too long.
        Raises as submit() does.
        """
        try:
            pooling = chosen or self.generator.default_pooling
        except ValueError as error:
            raise ApiError(400, str(error), param="pooling") from None
        prompts = []
        for i, text in enumerate(texts):
            if not text:
                raise ApiError(400, f"input[{i}] is empty", param="input")
            if truncate and isinstance(text, str):
                prompts.append(self._first_tokens(text))
            else:
                prompts.append(self._tokens(text))
        return self._pooled(prompts, pooling)

    def rerank(self, query: str, documents: Sequence[str]) -> Outputs:
        """Submit a query with each document, whose relevance is that of the scores of labels.

        Raises as submit() does, and for a model that scores no pairs.
        """
        runtime = self.generator
        with self.refusals():
            prompts = pair_prompts(
                runtime.tokenizer, runtime, query, documents, most=self.max_prompt
            )
        return self._pooled(prompts, "rank")

    def _pooled(self, prompts: Sequence[list[int]], pooling: Pooled) -> Outputs:
        """Submit prompts, a few at a time, so that other requests find room in the queue."""

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
        """The chat template; tools: the one for tools. Raises ApiError."""
        if self.template is None:
            raise ApiError(400, "the model has no chat template; use /v1/completions")
        if not tools:
            return self.template
        template = self.template.for_tools
        if template.describes_tools:
            if not self._has_described_tools:
                self._has_described_tools = True
                _log.warning(_DESCRIBED_TOOLS, self.name)
        elif not template.has_tools:
            raise ApiError(400, "the chat template does not support tools", param="tools")
        return template

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn errors of prompts and options into ApiErrors."""
        try:
            yield
        except ContextFullError:
            raise self._too_long() from None
        except ValueError as error:
            raise refusal(error) from error

    def _tokens(self, prompt: str | list[int], *, parse_special: bool = False) -> list[int]:
        if isinstance(prompt, str):
            with self.refusals():
                return self.generator.tokenizer.encode(
                    prompt, parse_special=parse_special, most=self.max_prompt
                )
        if len(prompt) > self.max_prompt:
            raise self._too_long()
        return prompt

    def _first_tokens(self, text: str) -> list[int]:
        """The tokens of a text that fit, without computing all those of a long text.

        The tokens that the model expects after a text are there, too.
        """
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
            tokens = generator.tokenizer.encode(text[: 2 * n_characters])
        if len(tokens) <= most:
            return tokens
        ending = generator.tokenizer.ending
        return [*tokens[: most - len(ending)], *ending]

    def _too_long(self) -> TooLongError:
        most = self.max_prompt
        message = f"the prompt has more than {most} tokens, the server's limit"
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
    except CompilingError:  # endpoint.post() submits again
        raise
    except TimeoutError as error:
        raise ApiError(400, str(error)) from error
    except ImportError as error:  # llguidance is missing
        raise ApiError(501, str(error)) from error
    except queue.Full as full:
        raise ApiError(429, f"{full}; try again later", code="queue_full") from None
    except RuntimeError as error:
        raise closed() from error
