"""Progress of reading a long prompt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from h2o_cpp.generation.stream import Stream

_AFTER = 2.0  # seconds without a bar
_EVERY = 0.5


@contextmanager
def reading(stream: Stream) -> Iterator[Callable[[], None]]:
    """While a prompt is read, show a bar on a terminal; call the result at its end."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    ended = Event()
    thread = Thread(target=_show, args=(stream, ended), daemon=True)
    thread.start()

    def end() -> None:
        if not ended.is_set():
            ended.set()
            thread.join()

    try:
        yield end
    finally:
        end()


def _show(stream: Stream, ended: Event) -> None:
    if ended.wait(_AFTER):
        return
    from tqdm import tqdm  # type: ignore[import-untyped]  # only now, as this takes its time

    with tqdm(
        desc="reading",
        total=stream.prompt_tokens,
        initial=stream.prompt_tokens_read,
        unit=" tokens",
        leave=False,
    ) as bar:
        while not ended.wait(_EVERY):
            bar.total = stream.prompt_tokens
            bar.update(stream.prompt_tokens_read - bar.n)
