"""Reading the text files of commands."""

from __future__ import annotations

from pathlib import Path


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from None
