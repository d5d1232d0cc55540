"""Batches: many concurrent requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from h2o_cpp import _core
from h2o_cpp.arguments import short
from h2o_cpp.generation.request import Request

_EXPECTED = "expected what Generator.request() gives"


@dataclass(frozen=True)
class BatchPiece:
    """A piece of one request's output."""

    index: int  # of the request
    state: _core.Generation
    text: str  # may be empty if last
    last: bool


def run_batch(engine: _core.Engine, requests: Iterable[Request], n: int) -> Iterator[BatchPiece]:
    """Run requests, n at a time; yields pieces as they arrive.

    The iterable is read only as fast as requests can start, so it may be endless.

    Raises ValueError for an invalid request.
    """
    if not isinstance(requests, Iterable):
        raise TypeError(f"requests={short(requests)}, {_EXPECTED}")
    mailbox = _core.Mailbox()
    todo = enumerate(requests)
    together = isinstance(requests, Sequence)  # read common beginnings of prompts once
    running: dict[int, tuple[int, _core.Generation]] = {}
    try:
        while True:
            fresh: list[_core.Generation] = []
            while len(running) < n and (following := next(todo, None)) is not None:
                i, request = following
                if not isinstance(request, Request):
                    raise TypeError(f"requests[{i}]={short(request)}, {_EXPECTED}")
                state = request.submit(engine, eager=True, begin=not together)
                running[state.key] = i, state
                state.subscribe(mailbox)
                fresh.append(state)
            if together and fresh:
                engine.begin(fresh)
            if not running:
                return
            next(iter(running.values()))[1].check_may_wait()
            mailbox.wait()
            for key in dict.fromkeys(mailbox.take()):
                if key not in running:
                    continue
                i, state = running[key]
                # Read before poll(), so that no piece is missed.
                last = state.finish_reason is not None
                text = state.poll() or ""
                if last:
                    del running[key]
                if text or last:
                    yield BatchPiece(i, state, text, last)
    finally:
        for _, state in running.values():
            state.cancel()
