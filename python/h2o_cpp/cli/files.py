"""The text files of commands; "-" is stdin or stdout."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from pathlib import Path

STANDARD = Path("-")  # stdin or stdout


def read_text(file: Path) -> str:
    """The text of a file or of stdin. Raises ValueError unless it is UTF-8."""
    try:
        if file != STANDARD:
            return file.read_text(encoding="utf-8")
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="strict", newline=None)
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        name = "stdin" if file == STANDARD else file
        raise ValueError(f"{name}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def write_text(file: Path, text: str) -> None:
    """Write a text to a file or to stdout."""
    if file == STANDARD:
        sys.stdout.write(text)
    else:
        file.write_text(text, encoding="utf-8")


def check_outputs(*files: Path | None) -> None:
    """Raises an error for files that cannot be written, and if two of them are stdout."""
    if files.count(STANDARD) > 1:
        raise ValueError("two outputs would be written to stdout, give a file for one of them")
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise FileNotFoundError(f"{file.parent}: no such directory")
        if file is not None and file.is_dir():
            raise IsADirectoryError(f"{file}: a directory, expected a file")
