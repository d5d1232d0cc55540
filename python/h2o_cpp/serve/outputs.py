"""The outputs of one request: their pieces as they come, and what goes with them."""

from __future__ import annotations

import asyncio
import secrets
import string
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from h2o_cpp.generation.completion import Completion
from h2o_cpp.generation.stream import Generation
from h2o_cpp.generation.trace import Record, TokenLogprob
from h2o_cpp.model.policy import Policy
from h2o_cpp.reply import Call, CallDelta, Content, NoCall, Part, Reply, ReplyParser
from h2o_cpp.serve.errors import ApiError, closed, refusal
from h2o_cpp.serve.responses import FinishReason

_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass
class Output:
    """One output of a request, and how much of it has been sent."""

    index: int
    prompt: list[int]
    completion: Completion
    record: Record
    policy: Policy | Sequence[Policy]
    generation: Generation | None = None  # when it has ended
    begun: bool = False  # whether any of it has been sent
    parser: ReplyParser | None = None  # of a reply that may think and call tools
    max_calls: int | None = None
    reply: Reply = field(default_factory=Reply)  # what parts() has given so far
    _n_logprobs: int = 0
    _call_ids: list[str] = field(default_factory=list)

    async def pieces(self) -> AsyncIterator[str | Generation]:
        """Pieces as they come, and then the whole.

        Raises ApiError for what is wrong with the request, and when the Engine is closed.
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

    def take(self, piece: str | Generation) -> str:
        """The text of what pieces() gives."""
        if isinstance(piece, str):
            return piece
        self.generation = piece
        return ""

    def call_id(self, i: int) -> str:
        """Of the i-th call: nine letters and digits, as Mistral's templates demand."""
        while len(self._call_ids) <= i:
            self._call_ids.append("".join(secrets.choice(_ID_CHARACTERS) for _ in range(9)))
        return self._call_ids[i]

    def parts(self, piece: str, *, deltas: bool = False) -> list[Part]:
        """What a piece says, or the text of one that has ended, given once.

        deltas: of calls as they come; otherwise they are whole, and what is none is Content.
        """
        if self.parser is None:
            found: list[Part] = [Content(piece)] if piece else []
        else:
            found = self.parser.push(piece)
            if self.generation is not None:
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
        """The whole generation, when it has ended."""
        assert self.generation is not None
        return self.generation

    @property
    def finish_reason(self) -> FinishReason | None:
        """As OpenAI has it; None until it has ended."""
        if self.generation is None:
            return None
        if self.reply.calls and self.generation.finish_reason == "stop":
            return "tool_calls"
        return "stop" if self.generation.finish_reason == "stop" else "length"

    def new_logprobs(self) -> list[TokenLogprob]:
        """Those of the tokens whose pieces were read since the last call, the prompt's first."""
        begin = self._n_logprobs
        n_prompt = len(self.prompt) - 1 if self.record.prompt else 0
        self._n_logprobs = n_prompt + self.completion.n_read
        return self.record.logprobs_between(begin, self._n_logprobs)


class Outputs:
    """All outputs of a request. Closing them frees their sequences."""

    def __init__(self, outputs: list[Output]) -> None:
        self.all = outputs

    @property
    def ended(self) -> bool:
        """Whether all have ended."""
        return all(output.generation is not None for output in self.all)

    def count_tokens(self, n: int = 1) -> tuple[int, int]:
        """Tokens of the prompts, each of which has n outputs, and tokens generated."""
        n_prompt = sum(len(output.prompt) for output in self.all[::n])
        return n_prompt, sum(output.ended.completion_tokens for output in self.all)

    def pieces(self) -> AsyncGenerator[tuple[Output, str], None]:
        """Pieces as they come, of whichever output; with the last, an empty one, it has ended.

        Raises ApiError as Output.pieces() does.
        """
        return self._merged() if len(self.all) > 1 else self._of_one()

    async def _of_one(self) -> AsyncGenerator[tuple[Output, str], None]:
        [output] = self.all
        async for piece in output.pieces():
            yield output, output.take(piece)

    async def _merged(self) -> AsyncGenerator[tuple[Output, str], None]:
        # Of one piece: while it is not taken, the outputs gather text for larger ones.
        ready: asyncio.Queue[tuple[Output, str | Generation] | Exception] = asyncio.Queue(1)

        async def read(output: Output) -> None:
            try:
                async for piece in output.pieces():
                    await ready.put((output, piece))
            except Exception as error:
                await ready.put(error)

        readers = [asyncio.ensure_future(read(output)) for output in self.all]
        try:
            while not self.ended:
                found = await ready.get()
                if isinstance(found, Exception):
                    raise found
                output, piece = found
                yield output, output.take(piece)
        finally:
            for reader in readers:
                reader.cancel()

    def close(self) -> None:
        """Cancel those that have not ended."""
        for output in self.all:
            output.completion.close()
