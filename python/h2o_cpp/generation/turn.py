"""Taking turns: one Generator, several threads, one sequence."""

from __future__ import annotations

import threading
from collections.abc import Callable

# A waiting thread looks again after this long: a wake-up may be lost to an interrupt.
_PATIENCE_SECONDS = 1.0


class Turn:
    """The right to use a Generator's sequences; one holder at a time.

    A holder in another thread is waited for. An unfinished holder of the same thread could never
    go on while this thread waits, so it is ended, by the `end` it came with, which tells whether
    it could: another thread may be at work for it just now.

    KeyboardInterrupt may strike anywhere. So for those who hold the turn from call to call it is
    their identity that counts, not a lock: whoever may have been interrupted in `take` calls
    `give_back`, and it is right in any case. Those who need it for the length of a block hold a
    lock, by a `with` that is never torn because no code of Python enters or leaves it: `alone`.
    The mutex is held for a few instructions; it is re-entrant because the garbage collector may
    drop a holder just then.
    """

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._alone = threading.Lock()  # also while somebody waits for the holder
        self._holder: object = None
        self._last: object = None  # who had the turn last
        self._thread = 0
        self._end: Callable[[], bool] = _ended
        self._bells: list[threading.Lock] = []  # of waiting threads; released to wake them

    @property
    def last(self) -> object:
        """Who has the turn, or had it last."""
        return self._last

    def take(self, holder: object, end: Callable[[], bool]) -> object:
        """Wait for the turn; returns who had it last. `end` must not keep the holder alive."""
        self._end_own()
        with self._alone:
            self._wait()
            with self._mutex:
                self._thread, self._end = threading.get_ident(), end
                self._holder = holder
                last, self._last = self._last, holder
                return last

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

    def alone(self) -> threading.Lock:
        """For `with`: in its block, after settle(), nobody else has the turn."""
        self._end_own()
        return self._alone

    def settle(self, *, changes: bool = True) -> object:
        """In a block of alone(): wait for the holder; returns who had the turn last.

        changes: whether the sequences will then be others.
        """
        self._wait()
        with self._mutex:
            last = self._last
            if changes:
                self._last = None
            return last

    def _wait(self) -> None:
        """Until nobody has the turn."""
        while True:
            bell = threading.Lock()
            bell.acquire()
            with self._mutex:
                if self._holder is None:
                    return
                self._bells.append(bell)
            self._end_own()
            bell.acquire(timeout=_PATIENCE_SECONDS)

    def _end_own(self) -> None:
        """End the holder that this thread has left unfinished."""
        with self._mutex:
            holder, end = self._holder, self._end
            ours = holder is not None and self._thread == threading.get_ident()
        if ours and end():
            self.give_back(holder)


def _ended() -> bool:
    return True
