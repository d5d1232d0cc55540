"""tools/bench gpu: the measurements of a model, on the CPU with small ones."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import numpy as np
import pytest

from h2o_bench import gpu_machine, gpu_model
from h2o_bench.gpu_model import FULL, QUICK, Generation, GpuModel, Grid, file_bytes, firsts
from h2o_bench.main import main
from h2o_bench.measurements import gpu
from h2o_bench.results import Row
from h2o_bench.texts import Texts, TooLongError
from h2o_cpp import _core
from h2o_cpp.budget.policy import Policy
from support.shapes import SHAPES, small
from test_measurements import rows_of

LLAMA, OPT = ("small llama", "Q8_0"), ("small opt", "F16")


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small llama", small("TinyLlama-1.1B"))
    monkeypatch.setitem(SHAPES, "small opt", small("OPT-1.3B"))


PLAN = replace(
    QUICK,
    changes={},
    grid={LLAMA: Grid((16, 64), (64,)), OPT: Grid((16,), ())},
    paper={
        OPT: (
            Generation(32, 40, (2,), (3,), is_offloaded=True),
            Generation(24, 4, (1,), is_offloaded=True),
        )
    },
    scores=OPT,
    long_model=LLAMA,
    fixed=32,
    long=(40, 90),
    prompts=(64,),
    slots=(16, 64),
    n_steps=24,
    rounds=2,
)


def run(model: GpuModel, section: str) -> list[tuple[Mapping[str, Any], Row]]:
    return [(about, measure()) for about, measure in gpu_model.SECTIONS[section](model)]


@pytest.fixture
def llama_model(shapes: None, tmp_path: Path) -> GpuModel:
    return GpuModel(PLAN, *LLAMA, tmp_path, "cpu", inf)


@pytest.fixture
def opt_model(shapes: None, tmp_path: Path) -> GpuModel:
    return GpuModel(PLAN, *OPT, tmp_path, "cpu", inf)


def test_grid(llama_model: GpuModel) -> None:
    found = run(llama_model, "grid")
    assert [(a["sequences"], a["after"], a["cache"]) for a, _ in found] == [
        *((1, 16, cache) for cache in ("full", "hh=0.2")),
        *((1, 64, cache) for cache in ("full", "32 slots", "hh=0.2")),
        *((3, 64, cache) for cache in ("full", "32 slots", "hh=0.2")),
    ]
    full, fixed, share = (cells for about, cells in found if about["sequences"] == 3)
    assert len(full["ms"]) == PLAN.n_timed
    # 8 layers, 2 KV heads of 32, K and V of two bytes: 67 tokens on average, or 33 and 13.
    reads = [one["GB/s"] * median(one["ms"]) * 1e6 for one in (full, fixed, share)]
    token = 8 * 2 * 2 * 32 * 2
    assert reads[0] - reads[1] == pytest.approx(3 * (67 - 33) * token)
    assert reads[1] - reads[2] == pytest.approx(3 * (33 - 13) * token)
    assert full["tokens/s"] == 3e3 / median(full["ms"])


def test_prefill(llama_model: GpuModel) -> None:
    (about, full), (_, h2o) = run(llama_model, "prefill")
    assert about == {"tokens": 64, "cache": "full"}
    assert len(full["tokens/s"]) == len(h2o["tokens/s"]) == PLAN.rounds
    # 8 layers of width 256 with 2 KV heads of 32, feed-forward 512; two operations per weight.
    layers = 2 * 64 * 8 * (2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 512)
    # Each of the 64 * 65 / 2 query-key pairs: a product of 32 with K and one with V.
    flops = layers + 64 * 65 / 2 * 8 * 8 * 32 * 4
    assert full["TFLOP/s"] * full["first token, ms"] * 1e9 == pytest.approx(flops)


def test_scores_and_long_text(opt_model: GpuModel, llama_model: GpuModel) -> None:
    found = run(opt_model, "scores")
    assert [(a["sequences"], a["slots"]) for a, _ in found] == [
        (b, s) for b in (1, 2) for s in (16, 64)
    ]
    assert all(len(cells[name]) == 24 for _, cells in found for name in ("window, us", "h2o, us"))
    assert [about["after"] for about, _ in run(llama_model, "long")] == [40, 90]


def test_paper_measures_equal_batch_and_equal_memory(opt_model: GpuModel) -> None:
    found = run(opt_model, "paper")
    cases = [(a["case"], a["batch"], a["cache"]) for a, _ in found]
    first = "32 + 40, offloaded"
    assert cases[:3] == [(first, 2, "full"), (first, 3, "full"), (first, 2, "hh=0.2")]
    case, batch, cache = cases[3]
    assert (case, cache) == (first, "hh=0.2")
    assert batch > 3
    full, same, equal = found[1][1], found[2][1], found[3][1]
    assert equal["cache GiB"] <= full["cache GiB"]
    times = equal["tokens/s"] / full["tokens/s"]
    assert equal["compared"] == f"{times:.2f}x full at batch 3"
    assert same["compared"].endswith("x full at batch 2")
    # More than half of eight layers of 2 * (4 * 256^2 + 2 * 256 * 512) bytes.
    assert opt_model.offloaded.streamed_bytes > 4 * 2 * (4 * 256**2 + 2 * 256 * 512)


def test_samples_of_generations() -> None:
    """At the beginning, in the middle and at the end; all of a short one."""
    assert firsts(512, 1023, 16, None) == [0, 503, 1007]
    assert firsts(512, 1023, 16, 307) == [0]
    assert firsts(512, 31, 16, None) == [0, 16]


def test_plan() -> None:
    """Every planned shape exists; the files have about these sizes."""
    assert all(file_bytes({}, *model) > 4e9 for model in FULL.models)
    assert 39e9 < file_bytes({}, "GPT-NeoX-20B", "F16") < 43e9
    assert FULL.has("scores", "OPT-6.7B", "F16")
    assert not FULL.has("paper", "LLaMA-7B", "F16")


def gpu_rows(tmp_path: Path, *words: str, status: int = 0) -> list[Row]:
    found = tmp_path / "gpu.json"
    words = ("gpu", "--quick", "--device", "cpu", "--models", str(tmp_path), *words)
    assert main([*words, "--json", str(found)]) == status
    return rows_of(found)


def test_nothing_begins_after_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = gpu_rows(tmp_path, "--sections", "grid,paper", "--seconds", "0")
    assert {row["absent"] for row in rows} == {"no time was left"}
    args = Namespace(quick=True, seconds=0.0, device="cpu", sections="grid,scores", llama_cpp=None)
    rows = [*gpu._one(args, "OPT-1.3B", "F16", str(tmp_path))]
    assert {row["absent"] for row in rows} == {"not run: no time was left"}
    assert {row["table"] for row in rows} == {"grid", "scores"}


def test_failures_are_told_and_do_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter((MemoryError("9 GB"), TooLongError("reading would take 9 s"), ValueError("no")))

    def decode(*_: object) -> Row:
        raise next(errors)

    monkeypatch.setattr(gpu_model, "decode", decode)
    args = Namespace(quick=True, seconds=inf, device="cpu", sections="grid", llama_cpp=None)
    monkeypatch.setattr(
        gpu, "QUICK", replace(QUICK, grid={("OPT-1.3B", "F16"): Grid((16, 64), ())})
    )
    rows = [*gpu._one(args, "OPT-1.3B", "F16", str(tmp_path))][:3]
    assert [row["absent"] for row in rows] == [
        "does not fit in the device's memory",
        "not run: reading would take 9 s",
        "failed: ValueError: no",
    ]


def test_device_that_is_missing_fails(tmp_path: Path) -> None:
    words = ("--sections", "grid", "--shapes", "OPT-1.3B", "--device", "cuda:99")
    rows = gpu_rows(tmp_path, *words, status=1)
    assert all(row["absent"].startswith("failed: ValueError: ") for row in rows)


def test_process_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    rows = gpu_rows(tmp_path, "--sections", "grid", "--shapes", "OPT-1.3B", status=1)
    assert [row["absent"] for row in rows] == ["failed: the process ended with status 1"]
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    monkeypatch.setattr(gpu, "_GRACE", 0.0)
    begun = monotonic()
    rows = [*gpu._in_a_process(["--one", "a", "b"], 0.1)]
    assert [row["absent"] for row in rows] == ["failed: the process ended with status -9"]
    assert monotonic() - begun < 500


def test_long_contexts_are_not_read(tiny_opt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first text is read, then copied once, to see which is faster."""
    model = _core.Model(tiny_opt, device="cpu", threads=1)
    clock = iter(range(0, 1000, 10))  # seconds
    monkeypatch.setattr("h2o_bench.texts.perf_counter", lambda: next(clock))
    texts = Texts(model, Policy.h2o(4, 6), n_ctx=64, n_batch=16, n_sequences=4)
    with pytest.raises(TooLongError, match="take 20 s"):
        texts.fill(20, most=15)
    assert [texts.session.tokens_seen(sequence) for sequence in range(4)] == [20, 20, 0, 0]


def test_filled_texts_are_complete(tiny_opt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _core.Model(tiny_opt, device="cpu", threads=1)
    for soon in (-1.0, 1000.0):  # copies, unless reading is faster; or only reading
        monkeypatch.setattr("h2o_bench.texts._SOON", soon)
        texts = Texts(model, Policy.h2o(4, 6), n_ctx=64, n_batch=16, n_sequences=4)
        texts.fill(20)
        texts.decode(3)
        texts.check(23)


def test_texts_are_read_together(tiny_opt: Path) -> None:
    """With the tokens of reading one after another."""
    model = _core.Model(tiny_opt, device="cpu", threads=1)
    following = []
    for together in (1, 2, 3):
        texts = Texts(model, Policy.h2o(4, 6), n_ctx=64, n_batch=24, n_sequences=3)
        texts.read(20, together=together)
        texts.decode(2)
        texts.check(22)
        following.append(texts._next.tolist())
    assert np.shape(following) == (3, 3)
    texts.reset()
    with pytest.raises(TooLongError):
        texts.read(20, most=0)


def test_texts_check_tokens_seen(tiny_opt: Path) -> None:
    model = _core.Model(tiny_opt, device="cpu", threads=1)
    texts = Texts(model, Policy.h2o(4, 6), n_ctx=64, n_batch=16, n_sequences=2)
    assert texts.read(20) > 0
    assert len(texts.decode(5)) == 5
    texts.check(25)
    assert [texts.session.tokens_seen(sequence) for sequence in range(2)] == [26, 26]
    with pytest.raises(RuntimeError, match="27 tokens, expected 26"):
        texts.check(25)
    texts.reset()
    texts.read(3)
    texts.check(3)


def test_missing_device() -> None:
    assert gpu_machine.describe("cpu") is None
    assert gpu_machine.memory_used("cpu") is None
    with pytest.raises(RuntimeError):
        gpu_machine.gpu_limits("cuda:99")
