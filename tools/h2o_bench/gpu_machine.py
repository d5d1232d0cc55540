"""A GPU: its name and memory from the driver's library, and its limits by PyTorch."""

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


def describe(device: str) -> str | None:
    """The GPU's name; None without one."""
    if (found := _handle(device)) is None:
        return None
    name = ctypes.create_string_buffer(96)
    found[0].nvmlDeviceGetName(found[1], name, len(name))
    return name.value.decode()


def memory_used(device: str) -> int | None:
    """Bytes of memory in use by all processes; None without a GPU."""
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
    found = _handle(device)
    if found is None or found[0].nvmlDeviceGetMemoryInfo(found[1], ctypes.byref(memory)):
        return None
    return memory[2]


@lru_cache(maxsize=8)
def _handle(device: str) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """NVML, and the device in it."""
    handle = ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    index = int(device.partition(":")[2] or "0")
    if device == "cpu" or library.nvmlInit_v2():
        return None
    failed = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    return None if failed else (library, handle)


def gpu_limits(device: str, nbytes: int = 1 << 32, size: int = 8192) -> dict[str, float]:
    """{"copy": bytes read and written per second, "f16": operations per second}.

    nbytes: copied between arrays. size: of two square matrices of random values; a multiply-add is
    two operations. Measured in a subprocess, so that PyTorch keeps no memory.

    Raises RuntimeError if PyTorch is missing or cannot use the device.
    """
    code = f"from h2o_bench.gpu_machine import _measure; _measure({device!r}, {nbytes}, {size})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=module_environment()
    )
    if done.returncode:
        raise RuntimeError((done.stderr.splitlines() or ["no output"])[-1])
    limits: dict[str, float] = json.loads(done.stdout)
    return limits


def _measure(device: str, nbytes: int, size: int) -> None:
    """Print the limits."""
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
    print(json.dumps({"copy": 2 * source.nbytes / copy, "f16": 2 * size**3 / matmul}))


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
