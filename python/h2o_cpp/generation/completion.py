"""Completions: outputs of an Engine, for threads and asyncio tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.generation.stream import Generation, GenerationHandle

if TYPE_CHECKING:
    from h2o_cpp.generation.event_loops import EventLoops


class Completion(Iterator[str], AsyncIterator[str], GenerationHandle):
    """The output of a request to an Engine: an iterator over pieces of text, each valid Unicode.

    In a thread: `for piece in completion`, or `completion.result()` for all of it. In a task:
    `async for piece in completion`, or `await completion`. A reader that is slower than the engine
    gets the text of several tokens in one piece.

    The engine generates independently of the reader. Closing or dropping the Completion, and
    interrupting or cancelling a wait for a piece, cancels the request, which frees its sequence at
    the next step. Reading raises the request's errors.
    """

    def __init__(self, engine: object, state: _core.Generation, loops: EventLoops) -> None:
        """`engine` is kept alive."""
        self._engine = engine
        self._state = state
        self._loops = loops
        self._was_ready = False  # whether the last piece was available without waiting

    @property
    def embedding(self) -> NDArray[np.float32]:
        """float32 [n_embd] at the end, if Engine.submit() had `pooling`; otherwise empty."""
        return self._state.embedding

    @property
    def n_read(self) -> int:
        """Tokens in the pieces read so far; at the end, all generated tokens."""
        return self._state.n_tokens_read

    def result(self) -> Generation:
        """Wait for the end and return the whole output, including pieces read before."""
        for _ in self:
            pass
        return Generation.of(self._state)

    def __next__(self) -> str:
        try:
            piece = self._next_piece()
        except BaseException:  # KeyboardInterrupt too
            self.close()
            raise
        if piece is None:
            raise StopIteration
        return piece

    async def __anext__(self) -> str:
        try:
            if self._was_ready:  # a fast engine must not block the loop
                await self._loops.let_others_run()
            self._was_ready = True
            while True:
                piece = self._state.poll()
                ended = piece is None and self.finish_reason is not None
                if ended:
                    piece = self._state.poll()  # that came between the two calls
                if piece is not None and not self._closed:
                    return piece
                if ended:
                    break
                self._was_ready = False
                await self._loops.wait(self._state)
        except BaseException:  # CancelledError too
            self.close()
            raise
        raise StopAsyncIteration

    def __await__(self) -> Generator[Any, None, Generation]:
        return self._whole().__await__()

    async def _whole(self) -> Generation:
        async for _ in self:
            pass
        return Generation.of(self._state)
