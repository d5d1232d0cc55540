"""Output files that appear whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_output(output: Path) -> Iterator[Path]:
    """A temporary file that becomes `output` if the block succeeds, and is removed if it does not.

    It is in the same directory, where a rename is atomic.
    """
    if not output.parent.is_dir():
        raise FileNotFoundError(f"{output.parent}: no such directory")
    if output.exists() and not output.is_file():
        raise ValueError(f"{output}: not a regular file, so it cannot be replaced")
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        os.replace(temporary, output)
    except BaseException:  # KeyboardInterrupt too
        temporary.unlink(missing_ok=True)
        raise
