"""Locks on files."""

import sys
from typing import BinaryIO

if sys.platform == "win32":
    import msvcrt

    def lock_file(file: BinaryIO) -> None:
        """Lock the file until it is closed. Raises BlockingIOError if another process has locked
        it."""
        file.seek(2**31 - 2)  # a byte past the end, as others cannot read locked bytes
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(*error.args) from None
else:
    import fcntl

    def lock_file(file: BinaryIO) -> None:
        """Lock the file until it is closed. Raises BlockingIOError if another process has locked
        it."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
