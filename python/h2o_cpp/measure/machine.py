"""The machine's bandwidth and arithmetic, and the memory of this process."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from h2o_cpp import _core

_READ_BYTES = 1 << 29  # several times the size of caches
_READ_PASSES = 10

# Operations per second of a large product. In a subprocess, because BLAS libraries set their
# threads when they are loaded.
_MATMUL_WIDTH = 2048
_MATMUL = """
import numpy, sys
from timeit import repeat
n = int(sys.argv[1])
a = numpy.ones((n, n), numpy.float32)
print(2 * n**3 / min(repeat(lambda: a @ a, number=1, repeat=5)))
"""


def processor() -> str:
    """The processor's name on Linux, else its architecture."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    name = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    return name[1] if name else platform.machine()


def n_processors() -> int:
    """The number of processors available to this process; of the machine, if unknown."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_bandwidth(threads: int) -> float:
    """Bytes per second that the threads together read from memory."""
    return _core.read_bandwidth(_READ_BYTES, threads=threads, passes=_READ_PASSES)


def matmul_flops(threads: int) -> float:
    """Operations per second of numpy's f32 matrix product; a multiply-add counts as two."""
    limits = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    done = subprocess.run(
        [sys.executable, "-c", _MATMUL, str(_MATMUL_WIDTH)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | dict.fromkeys(limits, str(threads)),
    )
    return float(done.stdout)


def rss_bytes() -> int:
    """Resident memory of this process, mapped files included. Only on Linux."""
    return status_bytes("VmRSS")


def peak_rss_bytes() -> int | None:
    """The largest resident memory of this process so far; None if unknown."""
    if platform.system() == "Linux":
        return status_bytes("VmHWM")
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if platform.system() == "Darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def status_bytes(name: str, process: int | str = "self") -> int:
    """A number of bytes from the status of a process. Only on Linux."""
    file = Path(f"/proc/{process}/status")
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{file} has no {name}")
