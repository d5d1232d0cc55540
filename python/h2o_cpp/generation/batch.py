"""Batches: many requests, continued at once by the thread that asks for their pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from h2o_cpp.generation.continuation import Continuation
from h2o_cpp.generation.request import Request
from h2o_cpp.generation.runtime import Runtime
from h2o_cpp.generation.scheduler import Scheduler
from h2o_cpp.generation.turn import Turn


def run_batch(
    runtime: Callable[[], Runtime], turn: Turn, requests: Iterable[Request]
) -> Iterator[tuple[int, Continuation, str]]:
    """Pieces of the texts as they come, with the indices of their requests.

    Every request's last piece, then with a finish_reason, comes even if it is empty. A request is
    asked for when there is a sequence for it, so there may be any number of them. Without
    max_tokens a text ends at n_ctx.

    Raises ValueError for a request that cannot be started, and RuntimeError if the thread has begun
    another stream in between.
    """
    holder = object()  # of the turn
    going_on = threading.Lock()  # held while it computes; and for ever by what has ended it
    try:
        turn.take(holder, lambda: going_on.acquire(blocking=False))
        n_ctx = runtime().session.n_ctx
        scheduler = Scheduler(runtime())
        todo = iter(enumerate(requests))
        index: dict[Continuation, int] = {}
        while True:
            if not going_on.acquire(blocking=False):
                raise RuntimeError("this batch was ended: its thread began another stream")
            try:
                while scheduler.n_free and (following := next(todo, None)) is not None:
                    i, request = following
                    index[scheduler.start(request.within(n_ctx))] = i
                pieces = scheduler.step()
            finally:
                going_on.release()
            if not scheduler.n_active and not pieces:
                return
            for continuation, piece in pieces:
                if continuation.error is not None:
                    raise continuation.error
                ended = continuation.finish_reason is not None
                if piece or ended:
                    i = index.pop(continuation) if ended else index[continuation]
                    yield i, continuation, piece
    finally:
        turn.give_back(holder)
