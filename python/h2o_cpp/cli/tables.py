"""Numbers and tables for people to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from h2o_cpp.cli.output import put
from h2o_cpp.files.visible_text import visible


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
