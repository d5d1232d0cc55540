"""llama.cpp's own programs, from a directory with their libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

_PAD = 256  # tokens; sequences have a multiple of this
_LAYERS = "99"  # all, on the device


class LlamaTools:
    """llama-bench and llama-batched-bench. Methods raise RuntimeError."""

    def __init__(self, directory: Path, device: str, seconds: float) -> None:
        """seconds: for all runs together."""
        self._directory = directory.resolve()
        self._on_gpu = device != "cpu"
        self._end = perf_counter() + seconds

    def prefill(
        self, path: Path, prompts: Sequence[int], rounds: int, passes: Sequence[int] = (512, 2048)
    ) -> tuple[str, dict[int, list[float]]]:
        """Its version, and seconds per round; the faster of several numbers of tokens per pass."""
        output = self._run(
            "llama-bench", "-m", str(path), "-ngl", _LAYERS, "-fa", "1", "-n", "0",
            "-p", ",".join(map(str, prompts)), "-r", str(rounds), "-o", "json",
            "-b", str(max(passes)), "-ub", ",".join(map(str, passes)),
        )  # fmt: skip
        found: dict[int, list[float]] = {}
        runs = json.loads(output)
        for run in runs:
            self._check(run)
            seconds = [nanoseconds / 1e9 for nanoseconds in run["samples_ns"]]
            best = found.setdefault(run["n_prompt"], seconds)
            if min(seconds) < min(best):
                found[run["n_prompt"]] = seconds
        return f"{runs[0]['build_commit']} {runs[0]['backends']} {runs[0]['gpu_info']}", found

    def decode(self, path: Path, contexts: Sequence[int], n: int, rounds: int) -> dict[int, float]:
        """Seconds per step of one sequence, by the context before it; the median of rounds."""
        output = self._run(
            "llama-bench", "-m", str(path), "-ngl", _LAYERS, "-fa", "1", "-p", "0", "-n", str(n),
            "-d", ",".join(map(str, contexts)), "-r", str(rounds), "-o", "json",
        )  # fmt: skip
        found = {}
        for run in json.loads(output):
            self._check(run)
            found[int(run["n_depth"])] = median(run["samples_ns"]) / 1e9 / n
        return found

    def decode_together(
        self, path: Path, contexts: Sequence[int], batch: int, n: int
    ) -> dict[int, float]:
        """Seconds per step of several sequences, by their context; the mean of n steps."""
        each = -(-(max(contexts) + n) // _PAD) * _PAD
        output = self._run(
            "llama-batched-bench", "-m", str(path), "-ngl", _LAYERS, "-fa", "on",
            "-c", str(batch * each), "-b", "2048", "-ub", "2048", "-npl", str(batch),
            "-npp", ",".join(map(str, contexts)), "-ntg", str(n), "--output-format", "jsonl",
        )  # fmt: skip
        return {row["pp"]: row["t_tg"] / row["tg"] for row in _rows(output)}

    def _check(self, run: Mapping[str, Any]) -> None:
        """Without a device it computes on the CPU, silently."""
        if self._on_gpu and not ("CUDA" in run["backends"] and run["gpu_info"]):
            raise RuntimeError("llama.cpp found no GPU")

    def _run(self, program: str, *words: str) -> str:
        # cuBLAS may be a package of this Python.
        cublas = (Path(path) / "nvidia" / "cu13" / "lib" for path in sys.path)
        places = [self._directory, *(place for place in cublas if place.is_dir())]
        paths = [*map(str, places), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        try:
            done = subprocess.run(
                [str(self._directory / program), *words],
                capture_output=True,
                text=True,
                env=os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(paths)},
                timeout=max(0.0, self._end - perf_counter()),
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{program}: did not end in time") from None
        except OSError as error:
            raise RuntimeError(f"{program}: {error.strerror}") from None
        if done.returncode:
            raise RuntimeError(f"{program}: {(done.stderr.splitlines() or ['no output'])[-1]}")
        return done.stdout


def _rows(output: str) -> list[dict[str, Any]]:
    """The lines of JSON."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]
