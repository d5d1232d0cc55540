"""Output files that are complete or absent."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_output(output: Path) -> Iterator[Path]:
    """A temporary file that becomes `output` if the block succeeds, and is removed if it does not.

    It is in the same directory, where a rename is atomic. An OSError names `output` instead of it.
    """
    if not output.parent.is_dir():
        raise FileNotFoundError(f"{output.parent}: no such directory")
    if output.exists() and not output.is_file():
        raise ValueError(f"{output}: not a regular file, so it cannot be replaced")
    temporary = output.with_name(f".{output.name}.{os.urandom(4).hex()}")
    try:
        try:
            yield temporary
            os.replace(temporary, output)
        finally:  # after a KeyboardInterrupt too
            temporary.unlink(missing_ok=True)
    except OSError as error:
        if error.filename is not None and str(error.filename) != str(temporary):
            raise  # it is about another file
        if error.errno is None:  # as numpy's of a short write
            raise OSError(f"{output}: could not be completed; is the disk full?") from error
        raise OSError(error.errno, os.strerror(error.errno), str(output)) from None


def check_absent(output: Path) -> None:
    """Raises FileExistsError if `output` would replace a file."""
    if output.is_file() or output.is_symlink():
        raise FileExistsError(f"{output}: the file exists already (--force replaces it)")
