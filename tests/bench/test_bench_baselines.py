"""The engine comparison: subprocesses that take turns, records, and the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from h2o_bench.baselines import ik_llama_cpp
from h2o_bench.comparison import Baseline, Comparison, Request
from h2o_bench.engine_process import EngineError, EngineProcess
from h2o_bench.models import Models
from h2o_bench.plot import plot_contexts
from h2o_bench.records import Record, Results
from h2o_bench.report import render, values_of
from h2o_bench.sections import QUICK, Bench, measure_contexts, measure_speed
from h2o_bench.shapes import SHAPES
from support.needs import packages
from test_bench_synthetic import small


@pytest.fixture(autouse=True)
def _fake_engine_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, *filter(None, sys.path)]))


def fake(name: str = "fake", **options: object) -> Baseline:
    return Baseline(name, "fake_engine", options)


def test_engine_measures_prefill_and_decode() -> None:
    with EngineProcess("fake_engine", {}) as engine:
        assert engine.description == {"name": "fake", "version": "7", "load_seconds": 0.25}
        answer = engine.prefill(11)
        assert len(answer.seconds) == 1
        assert answer.seconds[0] > 0
        assert answer.peak_rss_bytes > 1 << 20
        for context in (11, 20, 5):  # continues, extends, resets
            assert len(engine.decode(context, 3).seconds) == 3


LLAMA_BENCH = """#!/usr/bin/env python3
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if options["-m"] != "model.gguf":
    sys.exit("no such model")
n_prompt, n_gen = int(options["-p"]), int(options["-n"])
if "-gp" in options:
    n_prompt, n_gen = map(int, options["-gp"].split(","))
count = {"n_prompt": n_prompt, "n_gen": n_gen, "samples_ns": [9, 10**9 * (n_prompt + n_gen)]}
print(json.dumps([count | {"build_commit": "-".join(options[key] for key in ("-t", "-rtr"))}]))
"""


def test_engine_that_runs_a_program(tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(LLAMA_BENCH)
    program.chmod(0o755)
    one = ik_llama_cpp("model.gguf", program, 3, repack=True)
    with EngineProcess(one.module, one.options) as engine:
        assert engine.description == {"name": "ik_llama.cpp", "version": "3-1, repacked"}
        answer = engine.prefill(11)
        assert answer.seconds == [11.0]
        assert answer.peak_rss_bytes > 1 << 20
        assert engine.decode(11, 3).seconds == [14 / 3] * 3
        with pytest.raises(EngineError, match="a single sequence"):
            engine.batch(2, 3, 4)
    other = ik_llama_cpp("other.gguf", program, 3, repack=False)
    with pytest.raises(EngineError, match="no such model"):
        EngineProcess(other.module, other.options)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("miscounts", "1 steps and 4 tokens, expected 1 and 5"),
        ("fails", "RuntimeError: out of luck"),
        ("dies", "the process ended with status 3"),
    ],
)
def test_engine_faults_are_reported(fault: str, message: str) -> None:
    with (
        EngineProcess("fake_engine", {"fault": fault}) as engine,
        pytest.raises(EngineError, match=message),
    ):
        engine.prefill(5)


def test_engine_startup_errors_are_reported() -> None:
    with pytest.raises(EngineError, match="ValueError: no such model"):
        EngineProcess("fake_engine", {"fault": "cannot open"})
    with pytest.raises(EngineError, match="no answer within 1 s"):
        EngineProcess("fake_engine", {"fault": "hangs"}, timeout=1)


def test_missing_engine_module_is_reported() -> None:
    with pytest.raises(EngineError, match="the process ended with status 1"):
        EngineProcess("no_such_engine", {})


def test_engines_take_turns(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    with Comparison(results, 1, "model") as comparison:
        faults = {"a": "", "b": "", "broken": "cannot open", "failing": "fails"}
        comparison.open(fake(name, fault=fault) for name, fault in faults.items())
        comparison.ask([Request(7), Request(2, 5, repeats=2)], rounds=2)
        comparison.close("a")
        comparison.ask([Request(9)])
    records = [r for r in results if not r.measure.endswith(("rss", "seconds", "start"))]
    steps = [r for r in records if r.measure == "step seconds after 5"]
    records = [r for r in records if r not in steps]
    assert {record.section for record in records} == {1}
    turns = [(record.engine, record.measure) for record in records]
    one_round = [(name, "prefill 7") for name in "ab"]
    one_round += [(name, "decode 5") for name in "aabb"]
    failed = [("broken", "absent"), *one_round[:2], ("failing", "absent"), *one_round[2:]]
    assert turns == [*failed, *one_round, ("b", "prefill 9")]
    assert {r.engine: r.note for r in records if not r.values} == {
        "broken": "ValueError: no such model",
        "failing": "RuntimeError: out of luck",
    }
    values = values_of(results, 1)["model"]
    assert len(values["a"]["decode 5"]) == 4
    assert values["a"]["load_seconds"] == [0.25]


def test_results_are_persisted_and_can_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    records = [Record(n, "m", "e", "decode 1", (1.5, n), "note") for n in (1, 2, 3)]
    for record in records:
        Results(path).add(record)
    assert list(Results(path)) == records
    Results(path).forget([2, 0])
    assert list(Results(path)) == [records[0], records[2]]
    assert list(Results(tmp_path / "none")) == []


def speed(engine: str, measure: str, *values: float) -> Record:
    return Record(1, "shape Q8_0", engine, measure, values)


def test_speed_page() -> None:
    page = render(
        [
            Record(0, "A processor", "h2o.cpp", "processors", (2.0,)),
            Record(0, "A processor", "h2o.cpp", "threads", (2.0,)),
            Record(0, "A processor", "h2o.cpp", "read bandwidth", (41e9,)),
            Record(0, "A processor", "h2o.cpp", "read bandwidth", (43.5e9,)),
            Record(0, "A processor", "numpy", "f32", (190e9,)),
            Record(1, "shape Q8_0", "h2o.cpp", "start", (1.0,), "0.1"),
            speed("h2o.cpp", "bytes per token", 1e9),
            speed("h2o.cpp", "flops per token", 2e9),
            speed("h2o.cpp", "read bandwidth", 50e9),
            speed("h2o.cpp", "prefill 512", 200.0),
            speed("h2o.cpp", "prefill 512", 190.0),
            speed("h2o.cpp", "prefill 512", 210.0),
            speed("h2o.cpp", "prefill 512 rss", 1.0),
            speed("h2o.cpp", "decode 128", 40.0),
            speed("llama.cpp", "prefill 512", 100.0, 98.0, 160.0),
            speed("llama.cpp", "decode 128", 50.0),
            Record(1, "shape F16", "CTranslate2", "absent", note="not installed"),
            Record(1, "shape Q8_0", "CTranslate2", "absent", note="not installed"),
            Record(1, "", "", "command", note="tools/bench/baselines --rounds 3"),
        ]
    )
    assert "## Measured by\n\n```sh\ntools/bench/baselines --rounds 3\n```\n" in page
    assert "A processor, 2 processors, 2 threads. Read bandwidth" in page
    assert "before each part: 41.0, 43.5 GB/s." in page
    assert "| numpy | f32 | 190 |" in page
    assert "h2o.cpp 0.1." in page
    # 200 tokens/s of 2 GFLOP; 40 tokens/s of 1 GB, of 50 GB/s.
    prefill = "| shape Q8_0 | 200 (190 to 210) | 400 | 100 (98.0 to 160) **2.00x** |"
    decode = "| shape Q8_0 | 40.0 | 40.0 (80%) | 50.0 **0.80x** |"
    assert page.index(prefill) < page.index(decode)
    assert "- CTranslate2 on shape F16, shape Q8_0: not installed" in page
    assert "## 2" not in page


def contexts() -> Mapping[str, Mapping[int, float]]:
    return {"h2o.cpp, full": {64: 30.0, 256: 20.0}, "llama.cpp": {64: 20.0, 256: 5.0}}


def context_records() -> list[Record]:
    return [
        Record(2, "shape", engine, f"decode {context}{suffix}", (value,))
        for engine, rates in contexts().items()
        for context, rate in rates.items()
        for suffix, value in (("", rate), (" rss", context * 2.0**20))
    ]


def test_contexts_page() -> None:
    page = render(context_records(), "figure.png")
    assert "![tokens per second and memory against context](figure.png)" in page
    assert "| cache | 64 | 256 |" in page
    row = "| h2o.cpp, full | 30.0 **1.50x** | 20.0 **4.00x** |"
    assert row in page
    assert "| llama.cpp | 64 | 256 |" in page  # MiB


def test_scores_and_startup_page() -> None:
    page = render(
        [
            *(
                Record(3, "attention", name, "attend seconds", (micros * 1e-6,) * 4)
                for name, micros in (("window", 200), ("h2o", 201))
            ),
            Record(3, "model", "window", "decode 80", (100.0,)),
            Record(3, "model", "h2o", "decode 80", (80.0,)),
            Record(3, "model", "h2o", "decode 80 rss", (80.0,)),
            *(
                Record(4, "file", "h2o.cpp", measure, (value,))
                for measure, value in (
                    ("import_seconds", 0.125),
                    ("load_seconds", 0.25),
                    ("prefill 10", 20.0),
                    ("prefill 10 rss", 1.0),
                )
            ),
            Record(4, "file", "other", "import_seconds", (0.125,)),
            Record(4, "file", "other", "load_seconds", (0.25,)),  # no prompt was measured
            Record(4, "wheel", "h2o.cpp", "bytes", (3.0 * 2**20,), "h2o.whl"),
        ]
    )
    assert "| attention | 200 (200 to 200) | 201 (201 to 201) | +0.5% |" in page
    assert "| model | 10000 (10000 to 10000) | 12500 (12500 to 12500) | +25.0% |" in page
    seconds = ["0.125 (0.125 to 0.125)", "0.250 (0.250 to 0.250)", "0.500 (0.500 to 0.500)"]
    assert f"| h2o.cpp | {' | '.join(seconds)} | 0.875 |" in page
    assert f"| other | {' | '.join(seconds[:2])} |  |  |" in page
    assert "The wheel has 3.00 MiB." in page


@packages("matplotlib")
def test_plot(tmp_path: Path) -> None:
    plot_contexts(values_of(context_records(), 2), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_sections_measure_h2o_and_record_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results contain the baselines whether they are installed or not."""
    monkeypatch.setitem(SHAPES, "small", small("TinyLlama-1.1B"))
    plan = replace(
        QUICK, shapes=["small"], prompts=[20, 30], contexts=[("small", 2, (16, 40), False)]
    )
    results = Results(tmp_path / "results.jsonl")
    bench = Bench(plan, Models(tmp_path), results, threads=1)
    measure_speed(bench)
    measure_contexts(bench)
    assert not [r for r in results if r.engine.startswith("h2o.cpp") and not r.values]
    (speeds,) = values_of(results, 1).values()
    ours = {measure: len(values) for measure, values in speeds["h2o.cpp"].items()}
    assert (ours["prefill 20"], ours["prefill 30"], ours["decode 16"]) == (2, 1, 2)
    assert {"llama.cpp", "OpenVINO GenAI"} <= {r.engine for r in results if r.section == 1}
    (model,) = values_of(results, 2)
    assert model == "small Q8_0, 2 of 8 layers"
    found = values_of(results, 2)[model]
    for name in ("h2o.cpp, full", "h2o.cpp, 1024 slots", "h2o.cpp, hh=0.2"):
        assert len(found[name]["decode 16"]) == len(found[name]["decode 40"]) == 2
    page = render([*results])
    assert "## 1." in page
    assert "## 2." in page


def test_engines_can_be_selected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", small("TinyLlama-1.1B"))
    plan = replace(QUICK, shapes=["small"], prompts=[20], rounds=1)
    results = Results(tmp_path / "results.jsonl")
    measure_speed(Bench(plan, Models(tmp_path), results, threads=1, engines=("h2o",)))
    assert {record.engine for record in results} == {"h2o.cpp"}
    plan = replace(plan, contexts=(("small", 1, (16,), False),))
    only = Bench(plan, Models(tmp_path), results, threads=1, engines=("h2o.cpp, full",))
    measure_contexts(only)
    assert {record.engine for record in results if record.section == 2} == {"h2o.cpp, full"}
