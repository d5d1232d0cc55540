"""The sections of tools/bench/gpu; each model of ours is loaded once, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from math import prod
from pathlib import Path

from h2o_bench import gpu, gpu_peers, gpu_torch
from h2o_bench.engine_names import LLAMA_CPP, OURS, TORCH
from h2o_bench.gpu import Bench
from h2o_bench.gpu_plan import Paper, Torch
from h2o_bench.gpu_sections import GRID, LARGE, LONG, MACHINE, PAPER, PEERS
from h2o_bench.gpu_visit import visit
from h2o_bench.models import config
from h2o_cpp.convert.conversion import FAMILIES

_BYTES = {"F16": 2.0, "Q8_0": 1.07, "Q4_K_M": 0.62}  # per weight
_WRITTEN = 1.3e9  # bytes per second, of a file that is written and loaded
_MOST = 150.0  # seconds for transformers


def file_bytes(bench: Bench, shape: str, type_name: str) -> float:
    """About the size of a model's file."""
    sizes = config(shape, **bench.plan.changes)
    specs = FAMILIES[sizes["architectures"][0]].tensors(sizes)
    return _BYTES.get(type_name, 2.0) * sum(prod(spec.written_shape) for spec in specs)


def measure_grid(bench: Bench) -> None:
    """Decode and prefill of every shape and type; of some also scores and a long text."""
    for shape, type_name, *_ in bench.plan.grid:
        name = f"{shape} {type_name}"
        if _has_time(bench, GRID, shape, type_name):
            visit(bench, GRID, name, "grid", shape, type_name)
            _remove_files(bench)


def measure_long(bench: Bench) -> None:
    """Decode along one long text."""
    shape, type_name = bench.plan.long_model
    if _has_time(bench, LONG, shape, type_name):
        visit(bench, LONG, f"{shape} {type_name}", "long")
        _remove_files(bench)


def measure_paper(bench: Bench) -> None:
    """The paper's experiment."""
    _measure_paper(bench, PAPER, bench.plan.paper, bench.plan.torch)


def measure_large(bench: Bench) -> None:
    """The paper's experiment with its larger model."""
    _measure_paper(bench, LARGE, bench.plan.large, bench.plan.torch_large)


def _measure_paper(
    bench: Bench, section: int, models: Sequence[Paper], torch: Sequence[Torch]
) -> None:
    """Models with the same file share it; transformers has its turn after ours of a shape."""
    left = list(torch) if TORCH in bench.plan.engines else []
    for (shape, type_name), group in groupby(models, lambda paper: paper[:2]):
        if OURS in bench.plan.engines:
            _measure_file(bench, section, f"{shape} {type_name}", list(group))
        for one in [one for one in left if one.shape == shape]:
            left.remove(one)
            with bench.measuring(section, shape, TORCH):
                gpu_torch.measure(bench, section, one, _MOST)


def _measure_file(bench: Bench, section: int, name: str, papers: Sequence[Paper]) -> None:
    shape, type_name, *_ = papers[0]
    needed = file_bytes(bench, shape, type_name)
    needed *= 2 if any(paper.offload for paper in papers) else 1
    available = _available_memory()
    if available is not None and available < needed:
        reason = f"needs {needed / 1e9:.0f} GB of host memory, {available / 1e9:.0f} are free"
        bench.absent(section, name, "all", f"not run: {reason}")
    elif _has_time(bench, section, shape, type_name):
        path = bench.file(shape, type_name)
        for paper in papers:
            what = f"{name}, offloaded" if paper.offload else name
            if bench.has_time(section, what, "all", 15.0):
                visit(bench, section, what, "paper", section, paper, path)
        path.unlink()


def measure_peers(bench: Bench) -> None:
    """llama.cpp and transformers beside ours."""
    engines = bench.plan.engines
    left = list(bench.plan.peer_torch) if TORCH in engines else []
    for shape, type_name in bench.plan.peers:
        name = f"{shape} {type_name}"
        if {OURS, LLAMA_CPP} & set(engines) and _has_time(bench, PEERS, shape, type_name):
            path = bench.file(shape, type_name)
            if OURS in engines:
                visit(bench, PEERS, name, "peer", shape, type_name, path)
            if LLAMA_CPP in engines:
                gpu_peers.measure_llama_cpp(bench, shape, type_name, path)
            path.unlink()
        if shape in left and type_name == _torch_after(bench, shape):
            left.remove(shape)
            with bench.measuring(PEERS, f"{shape} F16", "transformers"):
                gpu_peers.measure_transformers(bench, shape)


def _torch_after(bench: Bench, shape: str) -> str:
    """The type of this shape after which transformers has its turn."""
    types = [type_name for name, type_name in bench.plan.peers if name == shape]
    return "F16" if "F16" in types else types[-1]


def _has_time(bench: Bench, section: int, shape: str, type_name: str) -> bool:
    seconds = 10.0 + file_bytes(bench, shape, type_name) / _WRITTEN
    bench.progress(f"{shape} {type_name}: about {seconds:.0f} s until it can be measured")
    return bench.has_time(section, f"{shape} {type_name}", "all", seconds)


def _remove_files(bench: Bench) -> None:
    """What a process that was killed has left."""
    for path in bench.models.directory.iterdir():
        if path.is_file():
            path.unlink()


def _available_memory() -> float | None:
    """Bytes of host memory that are free, with what can be dropped."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024.0 * int(sizes[0]) if sizes else None


SECTIONS: dict[str, tuple[int, Callable[[Bench], None]]] = {
    "machine": (MACHINE, gpu.measure_machine),
    "grid": (GRID, measure_grid),
    "long": (LONG, measure_long),
    "paper": (PAPER, measure_paper),
    "peers": (PEERS, measure_peers),
    "large": (LARGE, measure_large),
}
