"""Reading text files."""

from __future__ import annotations

from pathlib import Path


def read_text(file: Path) -> str:
    """The text of a UTF-8 file. Raises OSError, and ValueError naming the file."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(file, error) from None


def not_utf8(source: str | Path, error: UnicodeDecodeError) -> ValueError:
    """The error to raise for bytes of a source that are not UTF-8."""
    return ValueError(f"{source}: not UTF-8 text: {error.reason} at byte {error.start}")
