"""Decode, prefill, scores and the paper's experiment on a GPU, with models of real shapes.

Sections: machine (what the GPU copies and multiplies), grid (decode by context, batch and cache),
prefill, scores (what they cost), long (a long text), paper (the paper's experiment, arXiv
2306.14048), peers (llama.cpp with the same files; --llama-cpp).

Each model is written to --models, loaded in a process of its own, which may crash or hang alone,
and removed. Logits must be finite, and caches hold as many distinct positions as their policy says.
--seconds N: nothing begins later; what is not run is told.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from math import inf, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from time import monotonic

from h2o_bench import gpu_machine
from h2o_bench.engine_process import module_environment
from h2o_bench.gpu_model import FULL, QUICK, SECTIONS, GpuModel, file_bytes
from h2o_bench.results import Row
from h2o_bench.texts import TooLongError

_GRACE = 20.0  # seconds after the deadline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sections", default="machine,grid,prefill", metavar="NAME,...")
    parser.add_argument("--shapes", metavar="NAME,...", help="(default: all)")
    parser.add_argument("--types", metavar="NAME,...", help="(default: all)")
    parser.add_argument("--device", default="cuda", metavar="NAME")
    parser.add_argument("--models", type=Path, metavar="DIR", help="(default: temporary)")
    parser.add_argument("--seconds", type=float, default=inf, metavar="N", help="for all together")
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="DIR",
        help="its llama-bench and llama-batched-bench, with their libraries",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small models, to see that it works")
    parser.add_argument("--one", nargs=3, metavar="X", help=argparse.SUPPRESS)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    sections = args.sections.split(",")
    if unknown := set(sections) - {"machine", *SECTIONS}:
        raise ValueError(f"there is no section {unknown.pop()}")
    end = monotonic() + args.seconds
    plan = QUICK if args.quick else FULL
    if args.one:
        yield from _one(args, *args.one)
        return
    if "machine" in sections:
        name = gpu_machine.describe(args.device) or args.device
        try:
            limits = gpu_machine.gpu_limits(args.device, plan.copy_bytes, plan.matmul_size)
            copy, f16 = limits["copy"] / 1e9, limits["f16"] / 1e12
            yield {"table": "machine", "gpu": name, "copy, GB/s": copy, "f16, TFLOP/s": f16}
        except RuntimeError as error:
            yield {"table": "machine", "gpu": name, "absent": str(error)}
    failed = False
    for shape, dtype in plan.models:
        wanted = [s for s in sections if s != "machine" and plan.has(s, shape, dtype)]
        is_chosen = shape in (args.shapes or shape).split(",")
        if not wanted or not is_chosen or dtype not in (args.types or dtype).split(","):
            continue
        with TemporaryDirectory(dir=args.models) as directory:
            words = ["--one", shape, dtype, directory, "--sections", ",".join(wanted)]
            words += ["--device", args.device, *(["--quick"] if args.quick else [])]
            words += ["--llama-cpp", str(args.llama_cpp)] if args.llama_cpp else []
            if not is_time(plan.changes, shape, dtype, end - monotonic()):
                yield {"model": f"{shape} {dtype}", "absent": "no time was left"}
                continue
            for row in _in_a_process(words, end - monotonic()):
                failed |= row.get("absent", "").startswith("failed")
                yield row
    if failed:
        raise RuntimeError("a measurement has failed")


def is_time(changes: dict[str, int], shape: str, dtype: str, left: float) -> bool:
    """Whether a model can be written and loaded in so many seconds."""
    return left > (1 if changes else 10) + file_bytes(changes, shape, dtype) / 1.3e9


def _in_a_process(words: list[str], left: float) -> Iterator[Row]:
    """Rows as the process tells them; the last says why it died, if it did."""
    words += ["--seconds", str(left)] if isfinite(left) else []
    name = " ".join(words[1:3])
    code = "import sys; from h2o_bench.measurements.gpu import tell; tell(sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE, text=True, env=module_environment(),
    ) as process:  # fmt: skip
        timer = Timer(left + _GRACE, process.kill) if isfinite(left) else None
        if timer is not None:
            timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
            if status := process.wait():
                yield {"model": name, "absent": f"failed: the process ended with status {status}"}
        finally:
            if timer is not None:
                timer.cancel()
            process.kill()


def tell(words: list[str]) -> None:
    """The process of a model: prints rows as lines of JSON."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for row in measure(parser.parse_args(words)):
        print(json.dumps(row), flush=True)


def _one(args: argparse.Namespace, shape: str, dtype: str, directory: str) -> Iterator[Row]:
    """The sections of a model; a measurement that fails does not end the others."""
    plan = QUICK if args.quick else FULL
    deadline = monotonic() + args.seconds
    model = GpuModel(plan, shape, dtype, Path(directory), args.device, deadline, args.llama_cpp)
    for section in args.sections.split(","):
        for about, run in SECTIONS[section](model):
            row = {"table": section, "model": model.name, **about}
            try:
                if deadline - monotonic() < plan.least_seconds:
                    raise TooLongError("no time was left")
                yield {**row, **run()}
            except TooLongError as error:
                yield {**row, "absent": f"not run: {error}"}
            except MemoryError:
                yield {**row, "absent": "does not fit in the device's memory"}
            except Exception as error:
                yield {**row, "absent": f"failed: {type(error).__name__}: {error}"}
