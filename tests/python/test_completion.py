"""Completions read by asyncio tasks: fairness to other tasks."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from h2o_cpp import Completion, Generator, _core
from h2o_cpp.generation.event_loops import EventLoops


class AlwaysReady:
    """A generation with a piece whenever it is asked for one, until `n` have been taken."""

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


def test_a_reader_that_never_waits_lets_other_tasks_run() -> None:
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


def test_a_mailbox_hears_of_an_admission_once(generator: Generator) -> None:
    """Or every wait for a piece would end at once, and a task that waits would spin."""
    engine = generator._runtime().engine
    mailbox = _core.Mailbox()
    # Nothing is computed before next().
    state = engine.submit(cast(Any, [5, 6]), sampling=_core.Sampling(), max_tokens=3)
    state.subscribe(mailbox)
    assert mailbox.take() == [state.key]
    state.subscribe(mailbox)
    assert mailbox.take() == []
    while state.next() is not None:
        pass
    assert state.key in mailbox.take()


class WithoutReaders(asyncio.SelectorEventLoop):
    """As by default on Windows: it cannot watch a socket."""

    def add_reader(self, *_: Any) -> None:  # type: ignore[override]
        raise NotImplementedError

    def remove_reader(self, *_: Any) -> Any:
        raise NotImplementedError


def test_a_loop_that_cannot_watch_sockets(generator: Generator) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "seed": 1, "ignore_eos": True}
    expected = generator.generate("The sea", **options).text

    async def read() -> list[str]:
        with generator.engine() as engine:
            completions = [engine.submit("The sea", **options) for _ in range(3)]
            return [(await completion).text for completion in completions]

    loop = WithoutReaders()
    try:
        assert loop.run_until_complete(read()) == [expected] * 3
    finally:
        loop.close()
