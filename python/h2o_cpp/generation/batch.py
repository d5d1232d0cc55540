"""Batches: many requests, continued at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from h2o_cpp import _core
from h2o_cpp.generation.request import Request


def run_batch(
    engine: _core.Engine, requests: Iterable[Request], n: int
) -> Iterator[tuple[int, _core.Generation, str]]:
    """Continue requests, n at a time; gives pieces as they come, with the indices of the requests.

    Every request's last piece, then with a finish_reason, comes even if it is empty. A request is
    asked for when it can begin, so there may be any number of them.

    Raises ValueError for a request that cannot be started.
    """
    mailbox = _core.Mailbox()
    todo = enumerate(requests)
    running: dict[int, tuple[int, _core.Generation]] = {}
    try:
        while True:
            while len(running) < n and (following := next(todo, None)) is not None:
                i, request = following
                state = request.submit(engine, eager=True)
                running[state.key] = i, state
                state.subscribe(mailbox)
            if not running:
                return
            mailbox.wait()
            for key in dict.fromkeys(mailbox.take()):
                if key not in running:
                    continue
                i, state = running[key]
                ended = state.finish_reason is not None
                piece = state.poll() or ""
                if ended:
                    del running[key]
                if piece or ended:
                    yield i, state, piece
    finally:
        for _, state in running.values():
            state.cancel()
