"""The first minutes on a GPU: is it there, is cuBLAS, and do the same steps give the same bits?

    python -m h2o_bench.gpu_check.smoke DEVICE [--no-cublas] [--large DIR] [--steps N] MODEL...

--large also decodes with two layers of a 7B shape, in F16 and Q4_K_M, whose kernels fill a GPU; DIR
is for the files.

Steps run as they come, and with what is new on a GPU switched off: launches that overlap, and
graphs. Each setting is a process, so that one that fails says nothing of the next. Then logits of
the given models are compared with the CPU's. Exits with 1 unless all is well.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from h2o_bench.engine_process import module_environment
from h2o_bench.models import Models

SETTINGS: dict[str, dict[str, str]] = {
    "without either": {"H2O_CUDA_OVERLAP": "0", "H2O_CUDA_GRAPHS": "0"},
    "without overlap": {"H2O_CUDA_OVERLAP": "0"},
    "without graphs": {"H2O_CUDA_GRAPHS": "0"},
    "as it comes": {},
}
_LARGE = ("F16", "Q4_K_M")
_LARGE_CHANGES = {"num_hidden_layers": 2, "vocab_size": 2048}
# |logits - those of the CPU| / |those of the CPU|: prompts are multiplied in 8 bits there, in f16
# here.
_MOST_FROM_CPU = 0.05

Logits = Mapping[str, NDArray[np.float32]]


def _decode(
    device: str, n_steps: int, models: list[str], variables: Mapping[str, str]
) -> tuple[str, Logits]:
    """The back end's name, and logits. Raises RuntimeError."""
    with TemporaryDirectory() as directory:
        to = Path(directory) / "logits.npz"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "h2o_bench.gpu_check.decode"),
                *(device, str(n_steps), str(to), *models),
            ],
            capture_output=True,
            text=True,
            env=module_environment() | dict(variables),
        )
        if done.returncode:
            last = (done.stderr.splitlines() or ["nothing was said"])[-1]
            raise RuntimeError(f"exit status {done.returncode}: {last}")
        with np.load(to) as found:
            return done.stdout.strip(), dict(found)


def differing(found: Logits, expected: Logits) -> list[str]:
    """The models and steps whose bits differ."""
    lines = []
    for name, logits in found.items():
        same = (logits.view(np.uint32) == expected[name].view(np.uint32)).all((1, 2))
        if not same.all():
            steps = np.flatnonzero(~same)
            lines.append(f"{name}: steps {steps[0]} to {steps[-1]}, {len(steps)} of {len(same)}")
    return lines


def distance(found: Logits, expected: Logits) -> float:
    """The largest |found - expected| / |expected| of a model; infinite for NaN."""
    most = 0.0
    for name, cpu in expected.items():
        if not name.endswith("full"):  # eviction may depend on rounding
            continue
        logits = found[name]
        norm = np.linalg.norm(logits - cpu) / np.linalg.norm(cpu)
        most = max(most, float(norm) if np.isfinite(norm) else float("inf"))
    return most


def main() -> int:
    """Print each result as soon as it is known."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--no-cublas", action="store_true")
    parser.add_argument("--large", type=Path, metavar="DIR")
    parser.add_argument(
        "--steps", type=int, default=200, metavar="N", help="(default: %(default)s)"
    )
    args = parser.parse_args()
    models = args.models
    if args.large is not None:
        large = Models(args.large)
        models = [*models, *(str(large.gguf("LLaMA-7B", t, **_LARGE_CHANGES)) for t in _LARGE)]
    failed = False
    first: Logits | None = None
    last: Logits | None = None
    for setting, variables in SETTINGS.items():
        try:
            backend, logits = _decode(args.device, args.steps, models, variables)
        except RuntimeError as error:
            print(f"{setting}: {error}", flush=True)
            failed = True
            continue
        if first is None:
            first = logits
            print(f"{setting}: {backend}", flush=True)
            if "no cuBLAS" in backend and not args.no_cublas:
                print(f"there is no cuBLAS in {os.environ.get('LD_LIBRARY_PATH', 'the system')}")
                failed = True
        elif lines := differing(logits, first):
            print(f"{setting}: {backend}: OTHER BITS", *lines, sep="\n  ", flush=True)
            failed = True
        else:
            print(f"{setting}: {backend}: the same bits", flush=True)
        last = logits
    if last is None:
        return 1
    _, expected = _decode("cpu", args.steps, args.models, {})
    far = distance(last, expected)
    print(f"{far:.2e} from the CPU, at most {_MOST_FROM_CPU}", flush=True)
    return int(failed or far > _MOST_FROM_CPU)


if __name__ == "__main__":
    sys.exit(main())
