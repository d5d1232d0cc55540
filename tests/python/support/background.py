"""Calls in other threads that must not hang, and a check that a Generator is still usable."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from h2o_cpp import Generator

PROMPT = "It was a dark and stormy night and the captain"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 30}
PATIENCE = 60.0  # seconds until a thread counts as hung

T = TypeVar("T")


class Background(Generic[T]):
    """A call in a daemon thread."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def runs(self, seconds: float) -> bool:
        """Whether it is still running after this many seconds."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def result(self, patience: float = PATIENCE) -> T:
        """The call's result or exception."""
        assert not self.runs(patience), "stuck"
        if self._error is not None:
            raise self._error
        return self._values[0]

    def _run(self) -> None:
        try:
            self._values.append(self._call())
        except BaseException as error:  # result() raises it
            self._error = error


def greedy(generator: Generator) -> str:
    return generator.generate(PROMPT, **GREEDY).text


def assert_usable(generator: Generator, expected: str) -> None:
    """Check that it generates the same as a new Generator, in another thread and in this one."""
    assert Background(lambda: greedy(generator)).result() == expected
    assert greedy(generator) == expected
