"""Progress of reading a long prompt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from h2o_cpp import Generator
from h2o_cpp.cli.output import tell_progress

_AFTER = 2.0  # seconds without a line
_EVERY = 0.5


@contextmanager
def reading(generator: Generator, n_tokens: int) -> Iterator[Callable[[], None]]:
    """While a prompt is read, say on a terminal how much of it; call the result at its end."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    ended = Event()
    before = generator.stats().tokens_seen
    thread = Thread(target=_show, args=(generator, before, n_tokens, ended), daemon=True)
    thread.start()

    def end() -> None:
        if not ended.is_set():
            ended.set()
            thread.join()

    try:
        yield end
    finally:
        end()


def _show(generator: Generator, before: int, n_tokens: int, ended: Event) -> None:
    shown = False
    seconds = _AFTER
    while not ended.wait(seconds):
        seconds = _EVERY
        n_read = generator.stats().tokens_seen - before
        share = f" {max(n_read, 0) / n_tokens:.0%} of" if n_tokens else ""
        tell_progress(f"[reading{share} {n_tokens} tokens]")
        shown = True
    if shown:
        tell_progress()
