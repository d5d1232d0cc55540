"""The texts of one request: their pieces as they come, and what goes with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from h2o_cpp.generation.completion import Completion
from h2o_cpp.generation.stream import Generation
from h2o_cpp.generation.trace import Record, TokenLogprob
from h2o_cpp.model.policy import Policy
from h2o_cpp.serve.errors import closed, refusal
from h2o_cpp.serve.responses import FinishReason


@dataclass
class ServedText:
    """One text of a request, and how much of its record has been given away."""

    index: int
    prompt: list[int]
    completion: Completion
    record: Record
    policy: Policy | Sequence[Policy]
    generation: Generation | None = None  # when it has ended
    _n_logprobs: int = 0

    @property
    def ended(self) -> Generation:
        """What it amounted to, when it has ended."""
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
        return self.record.logprobs[begin : self._n_logprobs]


class ServedTexts:
    """All texts of a request. Closing them frees their sequences."""

    def __init__(self, texts: list[ServedText]) -> None:
        self.texts = texts
        self._pending: dict[asyncio.Task[str | None], ServedText] = {}

    async def pieces(self) -> AsyncIterator[tuple[ServedText, str]]:
        """Pieces as they come; the last of each text is empty, and its generation is then known.

        Raises ApiError for what is wrong with a text, and when the Engine is closed.
        """
        try:
            for text in self.texts:
                self._ask(text)
            while self._pending:
                done, _ = await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    text = self._pending.pop(task)
                    piece = await _answer(task)
                    if piece is None:
                        text.generation = await text.completion
                        if text.generation.finish_reason == "cancelled":
                            raise closed()
                    yield text, piece or ""
                    if piece is not None:
                        self._ask(text)
        finally:
            self.close()

    def close(self) -> None:
        """Cancel those that have not ended."""
        for task in self._pending:
            task.cancel()
        for text in self.texts:
            text.completion.close()

    def _ask(self, text: ServedText) -> None:
        task = asyncio.ensure_future(_next(text.completion))
        self._pending[task] = text


async def _next(completion: Completion) -> str | None:
    return await anext(completion, None)


async def _answer(task: asyncio.Task[str | None]) -> str | None:
    try:
        return await task
    except ValueError as error:
        raise refusal(error) from error
    except RuntimeError as error:
        raise closed() from error
