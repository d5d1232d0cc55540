"""Output files that are complete or unchanged."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_output(output: Path) -> Iterator[Path]:
    """A temporary file that becomes `output` if the block succeeds, and is deleted otherwise.

    It is in the same directory, so that the rename is atomic. An OSError names `output`.
    """
    check_output(output)
    temporary = output.with_name(f".{output.name}.{os.urandom(4).hex()}")
    try:
        try:
            yield temporary
            os.replace(temporary, output)
        finally:  # also after a KeyboardInterrupt
            temporary.unlink(missing_ok=True)
    except OSError as error:
        if error.filename is not None and str(error.filename) != str(temporary):
            raise  # about another file
        if error.errno is None:  # numpy, after a short write
            raise OSError(
                f"{output}: the file could not be written completely; is the disk full?"
            ) from error
        raise OSError(error.errno, os.strerror(error.errno), str(output)) from None


def check_output(output: Path, *, overwrite: bool = True) -> None:
    """Raises an error if `output` cannot be written, or would replace a file unless `overwrite`.

    A command that computes for long calls it first.
    """
    check_parent(output)
    if output.exists() and not output.is_file():
        raise ValueError(f"{output}: not a regular file")
    check_writable(output.parent)
    if not overwrite and (output.is_file() or output.is_symlink()):
        raise FileExistsError(f"{output}: the file already exists (--force replaces it)")


def check_writable(path: Path) -> None:
    """Raises PermissionError for a directory or file in which the user may not write."""
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def check_parent(output: Path) -> None:
    """Raises FileNotFoundError if `output` would be in a directory that does not exist."""
    if not output.parent.is_dir():
        raise FileNotFoundError(f"{output.parent}: no such directory")
