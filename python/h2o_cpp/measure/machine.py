"""The machine: what it is, what it can do at most, and how much memory this process has."""

from __future__ import annotations

import mmap
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from h2o_cpp import _core

_READ_BYTES = 1 << 29  # several times the size of caches
_READ_PASSES = 10

_PIECE = 8 << 20  # bytes that are read at a time from storage: more than any device wants
_MAX_BYTES = 256 << 20  # of a file; more tells no more
_SECONDS = 2.0

# Operations per second of the largest product: a process of its own, because BLAS libraries settle
# on their threads when they are loaded.
_MATMUL = """
import numpy
from timeit import repeat
a = numpy.ones((2048, 2048), numpy.float32)
print(2 * 2048**3 / min(repeat(lambda: a @ a, number=1, repeat=5)))
"""


def processor() -> str:
    """Its name, as Linux knows it."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    name = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    return name[1] if name else platform.machine()


def n_processors() -> int:
    """How many this process may run on."""
    return len(os.sched_getaffinity(0))


def read_bandwidth(threads: int) -> float:
    """Bytes per second that `threads` threads together read from memory."""
    return _core.read_bandwidth(_READ_BYTES, threads=threads, passes=_READ_PASSES)


def matmul_flops(threads: int) -> float:
    """Operations per second of numpy's f32 matrix product, two for each multiply-add."""
    limits = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    done = subprocess.run(
        [sys.executable, "-c", _MATMUL],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | dict.fromkeys(limits, str(threads)),
    )
    return float(done.stdout)


def storage_bandwidth(path: str | os.PathLike[str]) -> float:
    """Bytes per second of reading a file, past what the system has of it in memory.

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
            while n < _MAX_BYTES and perf_counter() - begun < _SECONDS:
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


def rss_bytes() -> int:
    """Memory that is resident in this process now, mapped files included."""
    return _status("VmRSS")


def peak_rss_bytes() -> int:
    """The most that was resident so far."""
    return _status("VmHWM")


def _status(name: str) -> int:
    """What the kernel says of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
