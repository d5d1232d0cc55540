"""transformers and Accelerate as baselines, in a subprocess that reports case by case."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import isfinite
from statistics import median
from tempfile import TemporaryFile
from threading import Timer
from typing import Any

from h2o_bench.engine_process import module_environment
from h2o_bench.gpu import Bench
from h2o_bench.gpu_paper import label_of
from h2o_bench.gpu_plan import Torch
from h2o_bench.models import config

Case = tuple[int, int, int]  # prompt, generated, batch


def answers(
    bench: Bench, shape: str, resident: Sequence[Case], offloaded: Sequence[Case], n_sample: int,
    most: float,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """What torch_generate prints; it ends after `most` seconds, or at the deadline."""
    positions = max(prompt + generated for prompt, generated, _ in (*resident, *offloaded)) + 64
    changes = {**bench.plan.changes, "max_position_embeddings": positions}
    options = {
        "config": config(shape, **changes),
        "device": bench.device,
        "resident": resident,
        "offloaded": offloaded,
        "n_sample": n_sample,
        "n_offloaded": max(2, bench.plan.n_offloaded - 1),
        "n_whole": 3 * n_sample,
    }
    seconds = min(most, bench.left())
    missing = [("transformers", case) for case in resident]
    missing += [("Accelerate offload", case) for case in offloaded]
    with (
        TemporaryFile() as told,
        subprocess.Popen(
            [sys.executable, "-m", "h2o_bench.torch_generate", json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
            env=module_environment(),
        ) as process,
    ):
        timer = Timer(seconds, process.kill) if isfinite(seconds) else None
        if timer is not None:
            timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    answer = json.loads(line)
                    with suppress(ValueError):
                        missing.remove((answer["engine"], tuple(answer["case"])))
                    yield answer
            status = process.wait()
            told.seek(0)
            errors = told.read().decode(errors="replace").splitlines()
        finally:
            if timer is not None:
                timer.cancel()
            process.kill()
    reason = errors[-1] if status > 0 and errors else "not run: no time was left"
    for engine, case in missing:
        yield {"engine": engine, "case": case, "error": reason}


def measure(bench: Bench, section: int, one: Torch, most: float) -> None:
    """The generations of the paper's experiment."""
    if not bench.has_time(section, one.shape, "transformers", 30.0):
        return
    bench.progress(f"{one.shape}: transformers")
    for answer in answers(bench, one.shape, one.resident, one.offloaded, bench.plan.n_paper, most):
        prompt, generated, batch = answer["case"]
        offload = answer["engine"].startswith("Accelerate")
        name = f"{one.shape} F16{', offloaded' if offload else ''}"
        label = label_of(name, prompt, generated, batch)
        if "error" in answer:
            bench.absent(section, label, answer["engine"], answer["error"])
            continue
        record = partial(bench.record, section, label, answer["engine"])
        record("version", note=answer["version"])
        record("prefill seconds", answer["prefill"])
        samples = answer["samples"]
        for first, seconds in samples.items():
            record(f"step seconds at {prompt + int(first)}", *seconds)
        mean = sum(map(median, samples.values())) / len(samples)
        record("decode seconds, extrapolated", (generated - 1) * mean)
        record("prompt", prompt)
        record("tokens", generated)
        record("cache bytes", answer["cache"])
        if answer["memory"]:
            record("device bytes", answer["memory"])
