"""Completions read by asyncio tasks."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from h2o_cpp import Completion, Generator, _core
from h2o_cpp.generation.event_loops import EventLoops
from support.background import PATIENCE


class AlwaysReady:
    """A generation whose next piece is always ready, for `n` pieces."""

    def __init__(self, n: int) -> None:
        self.n_left = n

    @property
    def finish_reason(self) -> str | None:
        return None if self.n_left else "length"

    def poll(self) -> str | None:
        if not self.n_left:
            return None
        self.n_left -= 1
        return "x"

    def cancel(self) -> None:
        pass


def test_completion_yields_to_other_tasks() -> None:
    async def read() -> int:
        state: Any = AlwaysReady(1000)
        return len([piece async for piece in Completion(None, state, EventLoops())])

    async def both() -> tuple[int, int]:
        reader = asyncio.ensure_future(read())
        n_turns = 0
        while not reader.done():
            n_turns += 1
            await asyncio.sleep(0)
        return reader.result(), n_turns

    n_pieces, n_turns = asyncio.run(both())
    assert n_pieces == 1000
    assert n_turns >= 999


def test_two_tasks_read_one_completion(generator: Generator) -> None:
    """Each piece goes to one of them, and both see the end."""

    async def run() -> tuple[list[str], str]:
        with generator.engine() as engine:
            completion = await engine.submit_async([5, 6], max_tokens=40, ignore_eos=True)

            async def read() -> str:
                return "".join([piece async for piece in completion])

            texts = await asyncio.gather(read(), read())
            return [*texts], (await completion).text

    texts, text = asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert sum(map(len, texts)) == len(text) > 0


def test_mailbox_is_notified_of_admission_once(generator: Generator) -> None:
    """Otherwise, every wait for a piece would return at once and the task would spin."""
    engine = generator._runtime().engine
    mailbox = _core.Mailbox()
    # Computation starts with next().
    state = engine.submit(cast(Any, [5, 6]), sampling=_core.Sampling(), max_tokens=3)
    state.subscribe(mailbox)
    assert mailbox.take() == [state.key]
    state.subscribe(mailbox)
    assert mailbox.take() == []
    while state.next() is not None:
        pass
    assert state.key in mailbox.take()


class NoReadersEventLoop(asyncio.SelectorEventLoop):
    """Cannot watch sockets, like the default event loop of Windows."""

    def add_reader(self, *_: Any) -> None:  # type: ignore[override]
        raise NotImplementedError

    def remove_reader(self, *_: Any) -> Any:
        raise NotImplementedError


def test_event_loop_without_readers(generator: Generator) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "seed": 1, "ignore_eos": True}
    expected = generator.generate("The sea", **options).text

    async def read() -> list[str]:
        with generator.engine() as engine:
            completions = [engine.submit("The sea", **options) for _ in range(3)]
            return [(await completion).text for completion in completions]

    loop = NoReadersEventLoop()
    try:
        assert loop.run_until_complete(read()) == [expected] * 3
    finally:
        loop.close()
