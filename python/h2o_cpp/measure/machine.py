"""The machine that something is measured on: what it is, and what it can do at most."""

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
    """Bytes per second that so many threads together read from memory."""
    return _core.read_bandwidth(_READ_BYTES, threads=threads, passes=_READ_PASSES)


def import_seconds() -> float:
    """How long a new process takes to import h2o_cpp."""
    code = (
        "from time import perf_counter as now; begun = now(); import h2o_cpp; print(now() - begun)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout)
