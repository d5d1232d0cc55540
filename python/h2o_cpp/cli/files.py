"""Reading the text files of commands and writing tables."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
