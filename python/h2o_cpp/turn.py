"""Taking turns: one Generator, several threads, one sequence."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class Turn:
    """The right to use a Generator's sequence; one holder at a time.

    A holder in another thread is waited for. An unfinished holder of the same thread could never
    go on while this thread waits, so it is ended, by the `end` it came with.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: object = None
        self._thread = 0
        self._end: Callable[[], None] = _nothing

    def take(self, holder: object, end: Callable[[], None]) -> None:
        """Wait for the turn. `end` must give it back, and must not keep the holder alive."""
        if self._holder is not None and self._thread == threading.get_ident():
            self._end()
        self._lock.acquire()
        self._holder, self._thread, self._end = holder, threading.get_ident(), end

    def give_back(self, holder: object) -> None:
        """Let the next one go on, if it is this holder's turn."""
        if self._holder is holder:
            self._holder, self._end = None, _nothing
            self._lock.release()

    def __enter__(self) -> None:
        self.take(self, _nothing)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.give_back(self)


def _nothing() -> None:
    pass
