"""Taking turns: one Generator, several threads, one sequence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A waiting thread looks again after this long: a wake-up may be lost to an interrupt.
_PATIENCE_SECONDS = 1.0


class Turn:
    """The right to use a Generator's sequence; one holder at a time.

    A holder in another thread is waited for. An unfinished holder of the same thread could never
    go on while this thread waits, so it is ended, by the `end` it came with, which tells whether
    it could: another thread may be at work for it just now.

    KeyboardInterrupt may strike anywhere. So it is the holder's identity that counts, not a lock
    that is held: whoever may have been interrupted in `take` calls `give_back`, and it is right
    in any case. The mutex is held for a few instructions, by `with`, which is never torn; it is
    re-entrant because the garbage collector may drop a holder just then.
    """

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._holder: object = None
        self._last: object = None  # who had the turn last
        self._thread = 0
        self._end: Callable[[], bool] = _ended
        self._bells: list[threading.Lock] = []  # of waiting threads; released to wake them

    def take(self, holder: object, end: Callable[[], bool]) -> object:
        """Wait for the turn; returns who had it last. `end` must not keep the holder alive."""
        while True:
            bell = threading.Lock()
            bell.acquire()
            with self._mutex:
                if self._holder is None:
                    self._thread, self._end = threading.get_ident(), end
                    self._holder = holder
                    last, self._last = self._last, holder
                    return last
                earlier, end_it = self._holder, self._end
                ours = self._thread == threading.get_ident()
                self._bells.append(bell)
            if ours and end_it():
                self.give_back(earlier)
            bell.acquire(timeout=_PATIENCE_SECONDS)

    def give_back(self, holder: object) -> None:
        """Let the next one go on, if it is this holder's turn."""
        with self._mutex:
            if self._holder is not holder:
                return
            self._holder, self._end = None, _ended
            bells, self._bells = self._bells, []
        for bell in bells:
            bell.release()

    def holds(self, holder: object) -> bool:
        """Whether it is this holder's turn."""
        with self._mutex:
            return self._holder is holder

    @contextmanager
    def hold(self, *, changes: bool = True) -> Iterator[object]:
        """Take the turn for the length of a `with`; gives who had it last.

        changes: whether the sequence is then another; if not, whoever had it last still did.
        """
        holder = object()
        last: object = None
        try:
            last = self.take(holder, _ended)
            yield last
        finally:
            with self._mutex:
                if not changes and self._holder is holder:
                    self._last = last
            self.give_back(holder)


def _ended() -> bool:
    return True
