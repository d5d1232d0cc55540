"""Numbers and tables for people to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO


def mebibytes(n: int) -> str:
    return f"{n / 2**20:.2f} MiB"


def cache_text(cache_bytes: int, archive_bytes: int) -> str:
    """The size of a cache, and of an archive if there is one."""
    archive = f", archive {mebibytes(archive_bytes)}" if archive_bytes else ""
    return mebibytes(cache_bytes) + archive


def print_table(rows: Mapping[str, str], *, width: int = 0, file: TextIO | None = None) -> None:
    """Print names and values; width: the least of the names' column."""
    width = max([width, *map(len, rows)])
    for name, value in rows.items():
        print(f"  {name:{width}}  {value}", file=file)
