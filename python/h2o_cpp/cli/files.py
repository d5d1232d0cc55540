"""The text files of commands; "-" is stdin or stdout."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from pathlib import Path

from h2o_cpp.cli.output import put_text
from h2o_cpp.files import text_files
from h2o_cpp.files.atomic import check_parent, check_writable

STANDARD = Path("-")  # stdin or stdout


def read_text(file: Path) -> str:
    """The text of a file or of stdin. Raises OSError, and ValueError unless it is UTF-8."""
    if file != STANDARD:
        return text_files.read_text(file)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict", newline=None)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise text_files.not_utf8("stdin", error) from None


def write_text(file: Path, text: str) -> None:
    """Write a text to a file or to stdout."""
    if file == STANDARD:
        put_text(text)
    else:
        file.write_text(text, encoding="utf-8")


def error_text(error: Exception) -> str:
    """The message of an error, without the number of an OSError and the core's "[gguf]"."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error).removeprefix("[gguf] ")


def check_outputs(**files: Path | None) -> None:
    """Raises an error for files, by option, that cannot be written, and if two are stdout."""
    both = " and ".join(f"--{name}" for name, file in files.items() if file == STANDARD)
    if " and " in both:
        raise ValueError(f"{both} would write to stdout, give a file")
    for file in filter(None, files.values()):
        check_parent(file)
        if file.is_dir():
            raise IsADirectoryError(f"{file}: a directory, expected a file")
        if file != STANDARD:
            check_writable(file if file.exists() else file.parent)
