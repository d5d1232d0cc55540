"""A limited number of places, given in order of arrival."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future


class Places:
    """Places that threads and asyncio tasks wait for alike: a Future is what both can wait for.

    Whoever has asked either gets its place, and gives it back once, or withdraws.
    """

    def __init__(self, n: int) -> None:
        self._mutex = threading.RLock()  # re-entrant: a signal handler may be waiting, too
        self._n_free = n
        self._waiting: deque[Future[None]] = deque()
        self._closed: Exception | None = None

    def ask(self) -> Future[None]:
        """Done when there is a place."""
        place: Future[None] = Future()
        with self._mutex:
            if self._closed is None and (self._waiting or not self._n_free):
                self._waiting.append(place)
                return place
            self._n_free -= 1
        self._answer(place)
        return place

    def give_back(self) -> None:
        """One more place, for the first who waits."""
        with self._mutex:
            while self._waiting:
                place = self._waiting.popleft()
                if self._answer(place):
                    return
            self._n_free += 1

    def withdraw(self, place: Future[None]) -> None:
        """It is not wanted any more, whether it has been got or not."""
        with self._mutex:
            if place in self._waiting:
                self._waiting.remove(place)
                return
        if not place.cancel():
            self.give_back()

    def close(self, reason: Exception) -> None:
        """From now on asking fails, and so has who waits."""
        with self._mutex:
            self._closed = reason
            waiting, self._waiting = self._waiting, deque()
        for place in waiting:
            self._answer(place)

    def _answer(self, place: Future[None]) -> bool:
        """Whether it is still wanted."""
        if not place.set_running_or_notify_cancel():
            return False
        if self._closed is None:
            place.set_result(None)
        else:
            place.set_exception(self._closed)
        return True
