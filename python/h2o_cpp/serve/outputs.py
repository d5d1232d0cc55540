"""The outputs of one request: their pieces as they come, and what goes with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

from h2o_cpp.generation.completion import Completion
from h2o_cpp.generation.stream import Generation
from h2o_cpp.generation.trace import Record, TokenLogprob
from h2o_cpp.model.policy import Policy
from h2o_cpp.serve.errors import ApiError, closed, refusal
from h2o_cpp.serve.responses import FinishReason


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
    _n_logprobs: int = 0

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
