"""Writes to the standard streams for the commands; no other module of them prints.

Names, metadata, templates and messages come from files and from the network: their control
characters are escaped, so that no terminal obeys them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from h2o_cpp.files.visible_text import message_line, visible, visible_json


def put(text: str = "", *, lines: bool = False) -> None:
    """Write a line to stdout; lines: `text` may have several."""
    print(visible(text, lines=lines), flush=True)


def put_json(document: Any, *, indent: int | None = 2) -> None:
    """Write JSON to stdout."""
    print(visible_json(document, indent=indent), flush=True)


def put_text(text: str) -> None:
    """Write a piece of a prompt, of an output or of a document: visibly to a terminal, otherwise
    unchanged.
    """
    print(visible(text, lines=True) if sys.stdout.isatty() else text, end="", flush=True)


def put_styled(text: str, *, to_stderr: bool = False) -> None:
    """Write a line of our own, with colors, in which everything else is visible."""
    print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def tell(text: str = "", *, lines: bool = False) -> None:
    """Write a line to stderr; lines: `text` may have several."""
    print(visible(text, lines=lines), file=sys.stderr)


def tell_error(text: str) -> None:
    """Write an error to stderr, as one line."""
    tell(message_line(f"error: {text}"))


def mebibytes(n: int) -> str:
    return f"{n / 2**20:.2f} MiB"


def cache_text(cache_bytes: int, archive_bytes: int) -> str:
    """The size of a cache, and of an archive if there is one."""
    archive = f", archive {mebibytes(archive_bytes)}" if archive_bytes else ""
    return mebibytes(cache_bytes) + archive


def print_table(
    rows: Mapping[str, str], *, width: int = 0, write: Callable[[str], None] = put
) -> None:
    """Print names and values; width: the least of the names' column."""
    names = [visible(name) for name in rows]
    width = max([width, *map(len, names)])
    for name, value in zip(names, rows.values(), strict=True):
        write(f"  {name:{width}}  {value}")
