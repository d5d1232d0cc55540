"""How fast a file is read from where it is stored."""

from __future__ import annotations

import mmap
import os
from time import perf_counter

_PIECE = 8 << 20  # bytes that are read at a time: more than any device wants
_MOST = 256 << 20  # of a file; more tells no more
_SECONDS = 2.0


def storage_bandwidth(path: str | os.PathLike[str]) -> float:
    """Bytes per second that reading a file gives, past what the system has of it in memory.

    Up to 256 MiB, or 2 seconds, from the beginning on, with O_DIRECT, which goes to the device; a
    device, or a machine below a virtual one, may have memory of its own.

    Raises OSError where the system or the file system cannot do that, and for an empty file.
    """
    if not hasattr(os, "O_DIRECT"):
        raise OSError("this system has no reads that go past its memory")
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, _PIECE) as piece:  # its address is a page's, as O_DIRECT wants it
            n = 0
            begun = perf_counter()
            while n < _MOST and perf_counter() - begun < _SECONDS:
                got = os.preadv(file, [piece], n)
                n += got
                if got < _PIECE:
                    break
            seconds = perf_counter() - begun
    finally:
        os.close(file)
    if not n:
        raise OSError(f"{os.fspath(path)}: there is nothing to read")
    return n / seconds
