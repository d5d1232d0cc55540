"""The outputs of one request: their pieces as they arrive, and their state."""

from __future__ import annotations

import asyncio
import secrets
import string
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from h2o_cpp.budget.policy import Policy
from h2o_cpp.generation.completion import Completion
from h2o_cpp.generation.prompt_memory import NOTHING_DROPPED, PromptMemory, PromptParts
from h2o_cpp.generation.record import Record, TokenLogprob
from h2o_cpp.generation.stream import Generation
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.reply import Call, CallDelta, Content, NoCall, Part, Reply, ReplyParser
from h2o_cpp.serve.errors import ApiError, closed, refusal
from h2o_cpp.serve.logprobs import TextOffset
from h2o_cpp.serve.openai_responses import FinishReason, MessageMemory

_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass
class Output:
    """One output of a request, and how much of it was sent.

    offset: where the next token that new_tokens() yields begins; None: none are recorded.
    """

    index: int
    prompt: list[int]
    completion: Completion
    record: Record
    policy: Policy | Sequence[Policy]
    offset: TextOffset | None = None
    generation: Generation | None = None  # set at the end
    prompt_parts: PromptParts = NOTHING_DROPPED  # of a conversation
    n_text: int = 0  # characters read
    submitted_at: float = field(default_factory=time.monotonic)
    first_at: float = 0.0  # when the first piece was read
    ended_at: float = 0.0
    begun: bool = False  # whether anything was sent
    n_sent: int = 0  # tokens sent as ids
    parser: ReplyParser | None = None  # for replies with reasoning or tool calls
    max_calls: int | None = None
    reply: Reply = field(default_factory=Reply)  # parts returned so far
    _n_logprobs: int = 0
    _call_ids: list[str] = field(default_factory=list)

    async def pieces(self) -> AsyncIterator[str | Generation]:
        """The pieces, then the finished generation.

        Raises ApiError if the request is invalid or the Engine is closed.
        """
        try:
            async for piece in self.completion:
                yield piece
            generation = await self.completion
        except ValueError as error:
            raise refusal(error) from error
        except MemoryError as error:
            raise ApiError(503, "there is not enough memory", code="unavailable") from error
        if generation.finish_reason == "cancelled":
            raise closed()
        yield generation

    def call_id(self, i: int) -> str:
        """The id of the i-th call: nine letters and digits, as Mistral's templates require."""
        while len(self._call_ids) <= i:
            self._call_ids.append("".join(secrets.choice(_ID_CHARACTERS) for _ in range(9)))
        return self._call_ids[i]

    def parts(self, piece: str, *, deltas: bool = False, more: bool = False) -> list[Part]:
        """Parse a piece; call it once for each piece, or once with a whole text.

        deltas: yield tool calls incrementally; otherwise complete, and malformed ones as Content.
        more: another piece follows, though the output has ended.
        """
        if self.parser is None:
            found: list[Part] = [Content(piece)] if piece else []
        else:
            found = self.parser.push(piece)
            if self.generation is not None and not more:
                found += self.parser.finish()
        found = [*self._wanted(found, deltas)]
        self.reply.add(found)
        return found

    def _wanted(self, parts: list[Part], deltas: bool) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, Call | CallDelta | NoCall):
                is_extra = self.max_calls is not None and part.index >= self.max_calls
                if isinstance(part, NoCall):
                    yield part if deltas and not is_extra else Content(part.text)
                elif not is_extra and (deltas or isinstance(part, Call)):
                    yield part
            else:
                yield part

    @property
    def ended(self) -> Generation:
        """The finished generation."""
        assert self.generation is not None
        return self.generation

    @property
    def prompt_memory(self) -> PromptMemory:
        """The memory of the prompt; evictions only at the end."""
        return self.completion.memory_of(self.prompt_parts)

    @property
    def message_memory(self) -> MessageMemory | None:
        """The memory of each message; None until the end, and without messages."""
        return self.prompt_memory.messages or None

    @property
    def finish_reason(self) -> FinishReason | None:
        """OpenAI's finish_reason; None until the end."""
        if self.generation is None:
            return None
        if self.reply.calls and self.generation.finish_reason == "stop":
            return "tool_calls"
        return "stop" if self.generation.finish_reason == "stop" else "length"

    def count_reasoning(self, tokenizer: Tokenizer) -> int:
        """The tokens of the reasoning, without those that mark it."""
        if not self.reply.reasoning:
            return 0
        n = len(tokenizer.encode(self.reply.reasoning, add_special=False, begins=False))
        return min(n, self.ended.completion_tokens)

    def new_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the tokens read since the last call; first those of the prompt.

        Tokens that are not in the text are left out: those after the beginning of a stop string.
        """
        return [found for found, _ in self.new_tokens()]

    def new_tokens(self) -> Iterator[tuple[TokenLogprob, int]]:
        """Does as new_logprobs(), each with the token's end in the text, in characters."""
        assert self.offset is not None
        n_prompt = len(self.prompt) - 1 if self.record.prompt else 0
        n_read = n_prompt + self.completion.n_read
        ends = self.generation is not None and not self.generation.stop_string
        for found in self.record.logprobs_between(self._n_logprobs, n_read):
            if self._n_logprobs >= n_prompt:
                if self.offset.value >= self.n_text and not ends:
                    return
                self.offset.add(found.token)
            self._n_logprobs += 1
            yield found, self.offset.value


class Outputs:
    """All outputs of a request. close() frees their sequences."""

    def __init__(
        self, outputs: list[Output], later: Sequence[Callable[[], Awaitable[Output]]] = ()
    ) -> None:
        """later: submit further outputs, each when an earlier one has ended."""
        self.all = outputs
        self._later = iter(later)
        self._n_unfinished = len(outputs) + len(later)
        self._closed = False

    @property
    def ended(self) -> bool:
        """Whether all outputs have ended."""
        return self._n_unfinished == 0

    def pieces(self) -> AsyncGenerator[tuple[Output, str], None]:
        """Pieces of all outputs as they arrive; an output ends with an empty piece.

        Raises ApiError as Output.pieces() does.
        """
        return self._merged() if self._n_unfinished > 1 else self._of_one()

    async def _of_one(self) -> AsyncGenerator[tuple[Output, str], None]:
        [output] = self.all
        async for piece in output.pieces():
            yield output, self._take(output, piece)

    async def _merged(self) -> AsyncGenerator[tuple[Output, str], None]:
        # One piece at a time: while it waits, the outputs accumulate text for larger ones.
        ready: asyncio.Queue[tuple[Output, str | Generation] | Exception] = asyncio.Queue(1)

        async def read(output: Output) -> None:
            try:
                while True:
                    async for piece in output.pieces():
                        await ready.put((output, piece))
                    submit = next(self._later, None)
                    if submit is None:
                        return
                    output = await submit()
                    self.all.append(output)
                    if self._closed:  # while it was submitted
                        output.completion.close()
                        raise closed()
            except Exception as error:
                await ready.put(error)

        readers = [asyncio.ensure_future(read(output)) for output in self.all]
        try:
            while not self.ended:
                found = await ready.get()
                if isinstance(found, Exception):
                    raise found
                output, piece = found
                yield output, self._take(output, piece)
        finally:
            for reader in readers:
                reader.cancel()

    def _take(self, output: Output, piece: str | Generation) -> str:
        """The text of an item from Output.pieces(); records the generation at the end."""
        if not output.first_at:
            output.first_at = time.monotonic()
        if isinstance(piece, str):
            output.n_text += len(piece)
            return piece
        output.ended_at = time.monotonic()
        output.generation = piece
        self._n_unfinished -= 1
        return ""

    def close(self) -> None:
        """Cancel unfinished outputs."""
        self._closed = True
        for output in self.all:
            output.completion.close()
