"""Threads that parse and tokenize requests, so that large ones do not delay others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_QUICK_BYTES = 8 * 2**10  # faster than switching to a thread
_SMALL_BYTES = 128 * 2**10

_T = TypeVar("_T")


class WorkerPool:
    """Runs the work between receiving a request and queueing its prompts.

    Small quick jobs run at once. Large ones run one at a time, because they need many times the
    memory of the body. Jobs with grammars wait for other processes, so they have threads of their
    own.
    """

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(2, "h2o-small")
        self._large = ThreadPoolExecutor(1, "h2o-large")
        self._small_grammars = ThreadPoolExecutor(8, "h2o-grammars")
        self._large_grammars = ThreadPoolExecutor(1, "h2o-large-grammars")

    async def run(
        self, n_bytes: int, job: Callable[[], _T], *, quick: bool = True, grammar: bool = False
    ) -> _T:
        """Run a job and return its result.

        quick: it may run in the event loop if it is small; grammar: it compiles a grammar.
        """
        if quick and not grammar and n_bytes <= _QUICK_BYTES:
            return job()
        if grammar:
            pool = self._small_grammars if n_bytes <= _SMALL_BYTES else self._large_grammars
        else:
            pool = self._small if n_bytes <= _SMALL_BYTES else self._large
        return await asyncio.get_running_loop().run_in_executor(pool, job)

    def close(self) -> None:
        """Stop the threads after their current jobs."""
        for pool in (self._small, self._large, self._small_grammars, self._large_grammars):
            pool.shutdown(cancel_futures=True)
