"""Measurements in a process of their own, so that one that crashes or hangs ends alone.

    python -m h2o_bench.gpu_visit <visit

reads a pickled Visit and exits with 3 if a measurement has failed, and is recorded.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

from h2o_bench import gpu_grid, gpu_paper, gpu_peers
from h2o_bench.engine_process import module_environment
from h2o_bench.gpu import Bench
from h2o_bench.gpu_plan import Plan
from h2o_bench.models import Models
from h2o_bench.printed_results import PrintedResults

_FAILED = 3  # a status that Python does not exit with
_GRACE = 20.0  # seconds after the deadline

VISITS: dict[str, Callable[..., None]] = {
    "grid": gpu_grid.measure_model,
    "long": gpu_grid.measure_long,
    "paper": gpu_paper.measure_model,
    "peer": gpu_peers.measure_ours,
}


@dataclass(frozen=True)
class Visit:
    """What to measure; times are of perf_counter(), which all processes share."""

    what: str
    arguments: tuple[Any, ...]
    plan: Plan
    models: Path
    results: Path
    device: str
    begun: float
    deadline: float


def visit(bench: Bench, section: int, label: str, what: str, *arguments: Any) -> None:
    """Run VISITS[what](bench, *arguments) in a process, and record it as absent if that dies."""
    request = Visit(
        what,
        arguments,
        bench.plan,
        bench.models.directory,
        bench.results.path,
        bench.device,
        bench.begun,
        bench.deadline,
    )
    left = bench.left()
    process = subprocess.Popen(
        [sys.executable, "-m", "h2o_bench.gpu_visit"],
        stdin=subprocess.PIPE,
        env=module_environment(),
    )
    try:
        process.communicate(pickle.dumps(request), left + _GRACE if isfinite(left) else None)
    except subprocess.TimeoutExpired:
        pass
    finally:
        ended = process.poll()
        process.kill()
        process.wait()
    if ended == 0:
        return
    bench.failures.append(label)
    if ended != _FAILED:
        how = "did not end in time" if ended is None else f"ended with status {ended}"
        bench.absent(section, label, "the rest", f"the process {how}")


def main() -> int:
    request: Visit = pickle.load(sys.stdin.buffer)

    def tell(text: str) -> None:
        print(f"{perf_counter() - request.begun:6.1f} s  {text}", file=sys.stderr, flush=True)

    bench = Bench(
        request.plan,
        Models(request.models),
        PrintedResults(request.results, tell),
        request.device,
        tell,
        request.deadline,
        begun=request.begun,
    )
    VISITS[request.what](bench, *request.arguments)
    return _FAILED if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
