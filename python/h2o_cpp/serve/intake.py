"""Where requests are parsed and tokenized, so that large ones do not keep the others waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_QUICK_BYTES = 8 * 2**10  # takes less time than another thread would cost
_SMALL_BYTES = 128 * 2**10

_T = TypeVar("_T")


class Intake:
    """Threads for what has to be done with a request before its prompts are in the queue.

    Quick requests take none, and those that are large are dealt with one by one: what they need
    for it, many times their bytes, is needed once.
    """

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(2, "h2o-small")
        self._large = ThreadPoolExecutor(1, "h2o-large")

    async def run(self, n_bytes: int, job: Callable[[], _T], *, quick: bool = True) -> _T:
        """What job() returns or raises; quick: it may be done at once if it is small."""
        if quick and n_bytes <= _QUICK_BYTES:
            return job()
        pool = self._small if n_bytes <= _SMALL_BYTES else self._large
        return await asyncio.get_running_loop().run_in_executor(pool, job)

    def close(self) -> None:
        """End the threads, after what they are doing."""
        for pool in (self._small, self._large):
            pool.shutdown(cancel_futures=True)
