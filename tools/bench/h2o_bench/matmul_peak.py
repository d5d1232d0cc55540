"""Operations per second of the largest matrix products, by type.

    python -m h2o_bench.matmul_peak THREADS

prints those of PyTorch as JSON. A subprocess, because BLAS libraries set their threads when they
are loaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from timeit import repeat
from typing import Any

from h2o_bench.engine_process import module_environment
from h2o_cpp.measure.machine import matmul_flops

_SIZE = 2048  # rows and columns
_REPEATS = 5


def matmul_peak(library: str, threads: int) -> dict[str, float]:
    """Operations per second of a library's largest products; a multiply-add is two.

    library: "numpy" gives {"f32": ...}; "torch", {"f32": ..., "bf16": ..., "int8": ...}.

    Raises RuntimeError if the library is missing or fails.
    """
    if library == "numpy":
        return {"f32": matmul_flops(threads)}
    done = subprocess.run(
        [sys.executable, "-m", "h2o_bench.matmul_peak", str(threads)],
        capture_output=True,
        text=True,
        env=module_environment() | {"OMP_NUM_THREADS": str(threads)},
    )
    if done.returncode:
        raise RuntimeError(f"{library}: {(done.stderr.splitlines() or ['no output'])[-1]}")
    peaks: dict[str, float] = json.loads(done.stdout)
    return peaks


def _torch(threads: int) -> dict[str, float]:
    import torch

    library: Any = torch
    library.set_num_threads(threads)
    f32 = library.ones(_SIZE, _SIZE)
    bf16, int8 = f32.to(library.bfloat16), f32.to(library.int8)
    products = {
        "f32": lambda: f32 @ f32,
        "bf16": lambda: bf16 @ bf16,
        "int8": lambda: library._int_mm(int8, int8),
    }
    return {
        name: 2 * _SIZE**3 / min(repeat(product, number=1, repeat=_REPEATS))
        for name, product in products.items()
    }


if __name__ == "__main__":
    print(json.dumps(_torch(int(sys.argv[1]))))
