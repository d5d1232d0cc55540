"""Files that belong to one process at a time."""

import sys
from typing import BinaryIO

if sys.platform == "win32":
    import msvcrt

    def lock_file(file: BinaryIO) -> None:
        """Have the file to oneself until it is closed. BlockingIOError: another process has it."""
        file.seek(2**31 - 2)  # others cannot read what is locked, so it is a byte that never is
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(*error.args) from None
else:
    import fcntl

    def lock_file(file: BinaryIO) -> None:
        """Have the file to oneself until it is closed. BlockingIOError: another process has it."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
