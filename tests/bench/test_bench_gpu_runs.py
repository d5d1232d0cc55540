"""tools/bench/gpu: the sections with a process for each model, on the CPU with small models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from h2o_bench import gpu_grid, gpu_paper, gpu_torch, gpu_visit
from h2o_bench.gpu import Bench
from h2o_bench.gpu_grid import Cell
from h2o_bench.gpu_plan import QUICK, Generation, Grid, Paper, Plan
from h2o_bench.gpu_report import render_gpu
from h2o_bench.gpu_runs import SECTIONS, file_bytes
from h2o_bench.gpu_sections import GRID, LARGE, LONG, MACHINE, PAPER, PEERS, PREFILL
from h2o_bench.models import Models
from h2o_bench.records import Record, Results
from h2o_bench.report import values_of
from h2o_bench.shapes import SHAPES
from h2o_bench.texts import Texts, TooLongError
from h2o_cpp import _core
from h2o_cpp.model.policy import Policy
from support.needs import packages
from test_bench_gpu import sample_records as of_scores_and_prefill
from test_bench_synthetic import small

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setitem(SHAPES, "small llama", small("TinyLlama-1.1B"))
    monkeypatch.setitem(SHAPES, "small opt", small("OPT-1.3B"))
    plan = replace(
        QUICK,
        changes={},
        grid=(Grid("small llama", "Q8_0", (16, 64), (64,)),),
        fixed=32,
        long_model=("small llama", "Q8_0"),
        long=(40, 90),
    )
    models = tmp_path / "models"
    models.mkdir()
    return Bench(plan, Models(models), Results(tmp_path / "gpu.jsonl"), "cpu", lambda text: None)


def absences(bench: Bench) -> list[tuple[str, str, str]]:
    return [(r.model, r.engine, r.note) for r in bench.results if r.measure == "absent"]


def test_grid_measures_all_of_a_model(bench: Bench) -> None:
    gpu_grid.measure_model(bench, "small llama", "Q8_0")
    assert not bench.failures
    assert not absences(bench)
    assert not list(bench.models.directory.iterdir())
    records = list(bench.results)
    values = values_of(records, GRID)
    assert {label: list(engines) for label, engines in values.items()} == {
        "small llama Q8_0, batch 1, after 16": ["full", "hh=0.2"],
        "small llama Q8_0, batch 1, after 64": ["full", "32 slots", "hh=0.2"],
        "small llama Q8_0, batch 3, after 64": ["full", "32 slots", "hh=0.2"],
    }
    of_three = values["small llama Q8_0, batch 3, after 64"]
    assert len(of_three["full"]["step seconds"]) == bench.plan.n_timed
    # 8 layers, 2 KV heads of 32, K and V of two bytes: 67 tokens on average, or 33 and 13.
    reads = [of_three[name]["bytes per step"][0] for name in of_three]
    assert reads[0] - reads[1] == 3 * (67 - 33) * 8 * 2 * 2 * 32 * 2
    assert reads[1] - reads[2] == 3 * (33 - 13) * 8 * 2 * 2 * 32 * 2
    assert set(values_of(records, PREFILL)["small llama Q8_0, 20 tokens"]) == {
        *("full", "h2o", "h2o.cpp")
    }
    assert len(values_of(records, LONG)) == 2
    page = render_gpu(records)
    for title in ("Prefill", "Decode by shape", "A long text"):
        assert f"## {title}" in page


def test_paper_measures_equal_batch_and_equal_memory(bench: Bench) -> None:
    generations = (Generation(32, 40, (2,), (3,)), Generation(24, 4, (1,)))
    paper = Paper("small opt", "F16", True, generations)
    path = bench.models.gguf("small opt", "F16")
    gpu_paper.measure_model(bench, PAPER, paper, path)
    assert not bench.failures
    assert not absences(bench)
    records = list(bench.results)
    values = values_of(records, PAPER)
    name = "small opt F16, offloaded, 32 + 40, batch"
    assert set(values[f"{name} 2"]) == {"full", "hh=0.2"}
    assert set(values[f"{name} 3"]) == {"full"}
    (equal,) = (label for label, found in values.items() if "equal to" in found.get("hh=0.2", {}))
    full, bounded = values[f"{name} 3"]["full"], values[equal]["hh=0.2"]
    assert bounded["cache bytes"][0] <= full["cache bytes"][0]
    # At the beginning, in the middle and at the end of 39 steps; all of 3.
    assert [m for m in full if m.startswith("step")] == [
        *(f"step seconds at {32 + first}" for first in (0, 18, 37))
    ]
    assert [m for m in bounded if m.startswith("step")] == ["step seconds at 32"]
    short = values["small opt F16, offloaded, 24 + 4, batch 1"]["full"]
    assert sum(len(v) for m, v in short.items() if m.startswith("step")) == 3
    # More than half of eight layers of 2 * (4 * 256^2 + 2 * 256 * 512) bytes.
    streamed = values_of(records, MACHINE)["small opt F16, offloaded"]["weights"]
    assert streamed["offloaded bytes"][0] > 4 * 2 * (4 * 256**2 + 2 * 256 * 512)


def test_nothing_begins_after_the_deadline(bench: Bench) -> None:
    late = replace(bench, deadline=perf_counter() + 1)
    for name in ("grid", "long", "paper", "peers", "large"):
        SECTIONS[name][1](late)
    found = absences(late)
    assert {note for _, _, note in found} == {"not run: no time was left"}
    assert ("small llama Q8_0", "all", "not run: no time was left") in found
    assert not [record for record in late.results if record.values]


def test_only_chosen_engines_are_measured(bench: Bench) -> None:
    for engines, expected in (
        (["h2o.cpp"], {"all"}),
        (["llama.cpp"], {"all"}),  # of the file
        (["transformers"], {"transformers"}),
        ([], set()),
    ):
        plan = replace(bench.plan, engines=engines)
        late = replace(bench, plan=plan, deadline=perf_counter() + 1)
        bench.results.forget([PAPER, PEERS, LARGE])
        for name in ("paper", "peers", "large"):
            SECTIONS[name][1](late)
        assert {engine.partition(",")[0] for _, engine, _ in absences(late)} == expected
        if engines == ["llama.cpp"]:
            assert {r.section for r in late.results} == {PEERS}


def test_failed_measurements_are_recorded(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (MemoryError("9 GB"), TooLongError("reading would take 9 s"), ValueError("no")):
        with bench.measuring(GRID, "shape", "full"):
            raise error
    assert [note for _, _, note in absences(bench)] == [
        "does not fit in the device's memory",
        "not run: reading would take 9 s",
        "ValueError: no",
    ]
    assert bench.failures == ["shape"]
    assert "ValueError: no" in capsys.readouterr().err


def test_process_that_dies_is_recorded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(bench.plan, grid=(Grid("no such shape", "F16", (), ()),))
    gpu_visit.visit(replace(bench, plan=plan), GRID, "none", "grid", "no such shape", "F16")
    (told,) = absences(bench)
    assert told == ("no such shape F16", "all", "KeyError: 'no such shape'")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    gpu_visit.visit(bench, GRID, "dead", "long")
    monkeypatch.setattr(gpu_visit, "_GRACE", 0.0)
    monkeypatch.setattr(sys, "executable", _sleeper(bench.models.directory))
    gpu_visit.visit(replace(bench, deadline=perf_counter() + 0.1), GRID, "slow", "long")
    assert absences(bench) == [
        told,
        ("dead", "the rest", "the process ended with status 1"),
        ("slow", "the rest", "the process did not end in time"),
    ]


def _sleeper(directory: Path) -> str:
    path = directory / "sleeper"
    path.write_text("#!/bin/sh\nexec sleep 600\n")
    path.chmod(0o755)
    return str(path)


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


def test_kept_tokens_and_cells() -> None:
    bounded, full = Cell(2, 100, "20 slots", 20), Cell(2, 100, "full", 0)
    assert (bounded.policy.budget, full.policy.budget) == (20, None)
    assert (bounded.kept(110), bounded.kept(10), full.kept(110)) == (21, 10, 110)


def test_samples_of_generations() -> None:
    long, short = Generation(512, 1024, ()), Generation(512, 32, ())
    assert gpu_paper.firsts(long, 1023, 16, None) == [0, 503, 1007]
    assert gpu_paper.firsts(long, 1023, 16, 307) == [0]
    assert gpu_paper.firsts(short, 31, 16, None) == [0, 16]


def test_plan_of_shapes_and_types(bench: Bench) -> None:
    plan = Plan().only(["LLaMA-7B", "OPT-6.7B"], ["F16"])
    assert [(one.shape, one.type_name) for one in plan.grid] == [
        *(("LLaMA-7B", "F16"), ("OPT-6.7B", "F16"))
    ]
    assert plan.peers == [("LLaMA-7B", "F16")]
    assert {one.shape for one in plan.paper} == {"OPT-6.7B"}
    # Every planned shape exists; the files have about these sizes.
    models = [*Plan().peers, *((one.shape, one.type_name) for one in Plan().grid)]
    models += [(one.shape, one.type_name) for one in (*Plan().paper, *Plan().large)]
    for shape, type_name in models:
        assert file_bytes(replace(bench, plan=Plan()), shape, type_name) > 4e9
    assert 39e9 < file_bytes(replace(bench, plan=Plan()), "GPT-NeoX-20B", "F16") < 43e9


@packages("torch", "transformers", "accelerate")
def test_transformers_generates(bench: Bench) -> None:
    gpu_torch.measure(replace(bench, plan=QUICK), PAPER, QUICK.torch[0], 300)
    assert not absences(bench)
    values = values_of(bench.results, PAPER)
    assert set(values["OPT-1.3B F16, 16 + 20, batch 3"]) == {"transformers"}
    (found,) = values["OPT-1.3B F16, offloaded, 16 + 20, batch 2"].values()
    # Two layers of width 64, K and V of two bytes; the prompt and three tokens less the last.
    assert found["cache bytes"] == [2 * (16 + 2) * 2 * 2 * 64 * 2]


def test_missing_transformers_is_recorded(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "torch.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(modules), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    gpu_torch.measure(replace(bench, plan=QUICK), PAPER, QUICK.torch[0], 60)
    assert [(engine, note) for _, engine, note in absences(bench)] == [
        *2 * [("transformers", "ImportError: not here")],
        ("Accelerate offload", "ImportError: not here"),
    ]


def sample_records() -> Iterator[Record]:
    yield Record(MACHINE, "A GPU", "torch", "copy", (4e12,))
    yield Record(MACHINE, "A GPU", "torch", "f16", (800e12,))
    for batch, context, cache, seconds, nbytes in (
        (1, 128, "full", 0.004, 14e9),
        (24, 2048, "full", 0.016, 40e9),
        (24, 2048, "1024 slots", 0.010, 25e9),
    ):
        label = f"shape F16, batch {batch}, after {context}"
        yield Record(GRID, label, cache, "step seconds", (seconds,))
        yield Record(GRID, label, cache, "bytes per step", (nbytes,))
        yield Record(GRID, label, cache, "cache bytes", (2.0**30,))
        yield Record(GRID, label, cache, "device bytes", (2.0**34,))
    yield Record(GRID, "shape F16, batch 24, after 8192", "full", "absent", note="does not fit")
    for context, seconds in ((1000, 0.004), (100000, 0.005)):
        yield Record(LONG, f"shape, after {context}", "1024 slots", "step seconds", (seconds,))
        yield Record(LONG, f"shape, after {context}", "1024 slots", "bytes per step", (8e9,))
    for batch, cache, prefill, decode in (
        (16, "full", 2.0, 18.0),
        (16, "hh=0.2", 2.0, 8.0),
        (80, "hh=0.2", 10.0, 20.0),
        (16, "Accelerate offload", 20.0, 380.0),
    ):
        label = f"OPT-6.7B F16, 512 + 1024, batch {batch}"
        if cache.startswith("Acc"):
            label = label.replace(",", ", offloaded,", 1)
        yield Record(PAPER, label, cache, "prefill seconds", (prefill,))
        yield Record(PAPER, label, cache, "decode seconds, extrapolated", (decode,))
        yield Record(PAPER, label, cache, "tokens", (1024.0,))
        yield Record(PAPER, label, cache, "cache bytes", (2.0**30,))
    yield Record(PAPER, "OPT-6.7B F16, 512 + 1024, batch 80", "hh=0.2", "equal to", (16.0,))
    for engine, seconds in (("h2o.cpp, full", 0.004), ("llama.cpp", 0.005)):
        yield Record(PEERS, "shape F16, batch 1, after 128", engine, "step seconds", (seconds,))
        yield Record(PEERS, "shape F16, 512 tokens", engine, "seconds", (100 * seconds,))
    yield Record(PEERS, "shape F16", "llama.cpp", "version", note="abc CUDA")


def test_page() -> None:
    page = render_gpu([*sample_records()])
    assert "llama.cpp abc CUDA." in page
    # 14 GB in 4 ms, of 4 TB/s.
    assert "| 1 | 128 | 4.000 / - | 250 / - | 3500 (88%) / - | 1.00 / - | 16.00 |" in page
    assert "| shape F16 | 24 | 2048 | 16.000 / 10.000 | 1500 / 2400 | 2500 (62%) / 2500" in page
    assert "- full on shape F16, batch 24, after 8192: does not fit" in page
    assert "| shape | 1024 slots | 100000 | 5.000 | 200 | 0.800 | 1600 (40%) |" in page
    # 16 x 1024 tokens in 20 s, in 10 s; 80 x 1024 in 30 s; 16 x 1024 in 400 s.
    assert "| full | 20.00 | 2.00 | 17.60 | 819.2 | 1.00 |  |  |" in page
    assert "| hh=0.2 | 10.00 | 2.00 | 7.82 | 1638.4 | 1.00 |  | 2.00x full |" in page
    assert "| 2730.7 | 1.00 |  | 3.33x full at batch 16 |" in page
    times = "hh=0.2 at batch 16 in device memory: 40.0x, hh=0.2 at batch 80 in device memory: 66.7x"
    assert f"| 41.0 | 1.00 |  | {times} |" in page
    assert "| H2O (20%) | 35.1 (4, G) |" in page
    assert page.count("18.83 (416, C)") == 1
    assert "| shape F16 | 1 | 128 | 250 | 200 **1.25x** |" in page
    assert "| shape F16, 512 tokens | 1280 | 1024 **1.25x** |" in page


def test_page_of_an_interrupted_run() -> None:
    """A measurement may end after any of its records."""
    records = [*sample_records(), *of_scores_and_prefill()]
    for n in range(len(records)):
        assert render_gpu(records[:n]).startswith("# On a GPU")


def test_quick_run_of_every_section(tmp_path: Path) -> None:
    """Except that no other engine is there."""
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    results, page = tmp_path / "gpu.jsonl", tmp_path / "gpu.md"
    words = [sys.executable, str(ROOT / "tools" / "bench" / "gpu"), "--results", str(results)]
    words += ["--page", str(page), "--models", str(tmp_path), "--quick", "--device", "cpu"]
    done = subprocess.run(
        [*words, "--sections", "grid,long,paper,peers,large"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr
    records = list(Results(results))
    assert {r.section for r in records if r.values} >= {GRID, LONG, PAPER, PEERS, LARGE, PREFILL}
    assert {r.engine for r in records if r.measure == "absent"} == {
        "transformers",
        "transformers, static cache, compiled",
        "Accelerate offload",
        "llama.cpp",
    }
    assert page.read_text().count("\n## ") == 7
    assert not list(tmp_path.glob("*.gguf"))
