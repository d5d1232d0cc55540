"""A GPU: its name, its limits, and its memory in use.

    python -m h2o_bench.gpu_machine DEVICE BYTES SIZE

prints limits measured with PyTorch as JSON; a subprocess, so that PyTorch keeps no memory.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from statistics import median
from time import perf_counter
from typing import Any

from h2o_bench.engine_process import module_environment

_BATCHES, _REPEATS = 5, 10  # median of batches, each long compared with waiting for the device


def gpu_limits(device: str, nbytes: int = 1 << 32, size: int = 8192) -> dict[str, float]:
    """{"copy": bytes read and written per second, "f16": operations per second}.

    nbytes: copied between arrays. size: of two square matrices of random values; a multiply-add is
    two operations.

    Raises RuntimeError if PyTorch is missing or cannot use the device.
    """
    done = subprocess.run(
        [sys.executable, "-m", "h2o_bench.gpu_machine", device, str(nbytes), str(size)],
        capture_output=True,
        text=True,
        env=module_environment(),
    )
    if done.returncode:
        raise RuntimeError((done.stderr.splitlines() or ["no output"])[-1])
    limits: dict[str, float] = json.loads(done.stdout)
    return limits


def describe(device: str) -> str | None:
    """Name, driver and memory from nvidia-smi; None without a GPU."""
    return _nvidia_smi(device, "name,driver_version,memory.total", "csv,noheader")


def memory_used(device: str) -> int | None:
    """Bytes of memory in use by all processes; None without a GPU."""
    if device != "cpu" and (library := _nvml()) is not None:
        handle, memory = ctypes.c_void_p(), _Memory()
        index = int(device.partition(":")[2] or "0")
        found = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        if not found and not library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return int(memory.used)
    mebibytes = _nvidia_smi(device, "memory.used", "csv,noheader,nounits")
    return None if mebibytes is None or not mebibytes.isdigit() else int(mebibytes) << 20


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


@lru_cache(maxsize=1)
def _nvml() -> ctypes.CDLL | None:
    """The driver's library, a thousand times faster than nvidia-smi."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def _nvidia_smi(device: str, query: str, format: str) -> str | None:
    if device == "cpu":
        return None
    index = device.partition(":")[2] or "0"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--id={index}", f"--query-gpu={query}", f"--format={format}"],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout.strip()


def _measure(device: str, nbytes: int, size: int) -> dict[str, float]:
    import torch

    library: Any = torch

    def wait() -> None:
        if device != "cpu":
            library.cuda.synchronize(device)

    source = library.randint(1 << 30, (nbytes // 4,), dtype=library.int32, device=device)
    target = library.empty_like(source)
    copy = _seconds(lambda: target.copy_(source), wait)
    a, b = (library.randn(size, size, dtype=library.float16, device=device) for _ in range(2))
    product = library.empty_like(a)
    matmul = _seconds(lambda: library.matmul(a, b, out=product), wait)
    return {"copy": 2 * source.nbytes / copy, "f16": 2 * size**3 / matmul}


def _seconds(run: Callable[[], object], wait: Callable[[], None]) -> float:
    """Seconds per run: the median of batches after a warm-up."""
    found = []
    for _ in range(1 + _BATCHES):
        wait()
        begun = perf_counter()
        for _ in range(_REPEATS):
            run()
        wait()
        found.append((perf_counter() - begun) / _REPEATS)
    return median(found[1:])


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
