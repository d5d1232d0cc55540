"""The most multiply-adds that libraries get out of this machine: its practical arithmetic limit.

    python -m h2o_cpp.measure.matmul_peak numpy|torch THREADS

prints JSON, operations per second by type. It is a process of its own because BLAS libraries settle
on their threads when they are loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

_SIZE = 2048  # of the square matrices
_REPEATS = 5


def matmul_peak(library: str, threads: int) -> dict[str, float]:
    """Operations per second, two for each multiply-add, of the largest products of a library.

    library: "numpy" gives {"f32": ...}; "torch", {"f32": ..., "bf16": ..., "int8": ...}.

    Raises RuntimeError if the library is not there or cannot.
    """
    limits = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    done = subprocess.run(
        [sys.executable, "-m", "h2o_cpp.measure.matmul_peak", library, str(threads)],
        capture_output=True,
        text=True,
        env=os.environ | dict.fromkeys(limits, str(threads)),
    )
    if done.returncode:
        raise RuntimeError(f"{library}: {(done.stderr.splitlines() or ['no output'])[-1]}")
    peaks: dict[str, float] = json.loads(done.stdout)
    return peaks


def _numpy() -> dict[str, float]:
    a = np.ones((_SIZE, _SIZE), np.float32)
    return {"f32": _fastest(lambda: a @ a)}


def _torch(threads: int) -> dict[str, float]:
    import torch

    library: Any = torch
    library.set_num_threads(threads)
    f32 = library.ones(_SIZE, _SIZE)
    bf16, int8 = f32.to(library.bfloat16), f32.to(library.int8)
    return {
        "f32": _fastest(lambda: f32 @ f32),
        "bf16": _fastest(lambda: bf16 @ bf16),
        "int8": _fastest(lambda: library._int_mm(int8, int8)),
    }


def _fastest(multiply: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        begun = perf_counter()
        multiply()
        seconds.append(perf_counter() - begun)
    return 2 * _SIZE**3 / min(seconds)


if __name__ == "__main__":
    print(json.dumps(_numpy() if sys.argv[1] == "numpy" else _torch(int(sys.argv[2]))))
