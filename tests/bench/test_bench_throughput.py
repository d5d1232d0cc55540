"""tools/bench/throughput: sequences that fit in memory, arrivals, and the report."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from h2o_bench import throughput
from h2o_bench.arrivals import (
    Arrival,
    Observed,
    arrivals,
    measure_arrivals,
    run_continuous,
    run_static,
)
from h2o_bench.comparison import Baseline
from h2o_bench.engine_process import EngineError, EngineProcess
from h2o_bench.models import Models
from h2o_bench.records import Record, Results
from h2o_bench.report import values_of
from h2o_bench.shapes import SHAPES
from h2o_bench.throughput import (
    ARRIVALS,
    OFFLOAD,
    QUICK,
    SEQUENCES,
    TABLE,
    Bench,
    Entry,
    measure_offload,
    measure_sequences,
    measure_table,
)
from h2o_bench.throughput_report import render_throughput
from h2o_cpp import Generator
from test_bench_synthetic import small

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"


@pytest.fixture(autouse=True)
def _fake_engine_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, *filter(None, sys.path)]))


def test_batch_tokens_are_checked() -> None:
    with EngineProcess("fake_engine", {}) as engine:
        assert engine.batch(3, 5, 4).seconds == [0.5]
    with (
        EngineProcess("fake_engine", {"fault": "miscounts"}) as engine,
        pytest.raises(EngineError, match="1 steps and 21 tokens, expected 1 and 24"),
    ):
        engine.batch(3, 5, 4)


def test_h2o_batch_is_limited_to_its_sequences(tmp_path: Path) -> None:
    options = {"path": str(GOLDEN), "threads": 1, "n_ctx": 40, "hh": 12, "n_sequences": 3}
    with EngineProcess("h2o_bench.engines.h2o", options) as engine:
        assert engine.batch(3, 9, 5).seconds[0] > 0  # the engine checks the token counts
    with (
        EngineProcess("h2o_bench.engines.h2o", options) as engine,
        pytest.raises(EngineError, match="sequence 3"),
    ):
        engine.batch(4, 9, 5)


def test_sequences_that_fit_in_memory() -> None:
    entry = Entry(Baseline("one", "module", {}), weight_bytes=100, text_bytes=30.0)
    assert [entry.sequences(memory) for memory in (50, 129, 130, 189, 190)] == [0, 0, 1, 2, 3]


def test_observed_latencies() -> None:
    observed = Observed()
    observed.add(1.0, [(1.5, 1), (2.0, 2), (5.0, 4)])
    assert observed.first == [0.5]
    assert observed.gaps == [0.5, 1.5, 1.5]
    assert (observed.n_tokens, observed.seconds) == (4, 5.0)


def test_arrivals_are_reproducible_poisson_process() -> None:
    found = arrivals(400, 10.0, 1000)
    assert found == arrivals(400, 10.0, 1000)
    times = [arrival.at for arrival in found]
    assert times == sorted(times)
    assert times[0] == 0
    # The mean of 399 gaps of 0.1 s with a standard deviation of 0.1 s: five standard errors.
    assert abs(times[-1] / 399 - 0.1) < 5 * 0.1 / 399**0.5
    assert all(16 <= len(x.prompt) <= 512 and 16 <= x.n <= 256 for x in found)
    assert {arrival.at for arrival in arrivals(9, None, 1000)} == {0.0}


def test_static_and_continuous_batching_give_every_token() -> None:
    requests = [Arrival(i / 100, [5 + i] * (i + 1), 3 + i) for i in range(7)]
    with Generator(GOLDEN, hh=12, n_batch=8, max_sequences=2, threads=1) as generator:
        runtime = generator._runtime()
        for run in (run_static, run_continuous):
            observed = run(runtime, requests)
            assert observed.n_tokens == sum(request.n for request in requests)
            assert len(observed.first) == len(requests)
            assert len(observed.gaps) < observed.n_tokens
            assert min(observed.first) > 0
            assert observed.seconds >= requests[-1].at


def test_sections_measure_h2o_and_record_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other engines are recorded as absent, installed or not."""
    monkeypatch.setitem(SHAPES, "small", small("OPT-1.3B"))
    monkeypatch.setattr(throughput, "_ENGINES", "no_such_package")
    plan = replace(
        QUICK, shapes=["small"], prompt=20, lengths=[3], counts=[1, 2], steps=2, requests=3
    )
    results = Results(tmp_path / "results.jsonl")
    bench = Bench(plan, Models(tmp_path), results, threads=1, memory=None)
    for measure in (measure_table, measure_offload, measure_sequences):
        measure(bench)
    # Arrivals use n_ctx=768.
    measure_arrivals(bench)
    for section in (TABLE, OFFLOAD):
        (engines,) = values_of(results, section).values()
        for name in ("h2o.cpp, full", "h2o.cpp, hh=0.2"):
            assert engines[name]["tokens/s"][0] > 0
            memory = engines[""]["memory"][0]
            assert 0 < engines[name]["computed bytes"][0] <= memory
        full, h2o = (engines[f"h2o.cpp, {kind}"]["sequences"][0] for kind in ("full", "hh=0.2"))
        assert h2o > full
    absent = {r.engine for r in results if r.measure == "absent"}
    assert any("transformers" in name for name in absent)
    page = render_throughput([*results])
    for section, title in (
        (TABLE, "Equal memory"),
        (OFFLOAD, "Less memory than the weights take"),
        (SEQUENCES, "Tokens per second against sequences"),
        (ARRIVALS, "Requests that arrive at random"),
    ):
        assert f"## {title}\n" in page
        assert values_of(results, section)


def test_page() -> None:
    def cell(engine: str, rate: float, n: float, length: int = 32) -> list[Record]:
        measured = {"tokens/s": rate, "sequences": n, "rss": (3.0 + n) * 2**20}
        return [
            Record(TABLE, f"OPT, 512 + {length}", engine, key, (value,))
            for key, value in measured.items()
        ]

    page = render_throughput(
        [
            Record(0, "A processor", "h2o.cpp", "threads", (2.0,)),
            Record(TABLE, "", "", "command", note="tools/bench/throughput"),
            Record(TABLE, "OPT, 512 + 32", "", "memory", (4.0 * 2**20,)),
            *cell("h2o.cpp, hh=0.2", 60.0, 9),
            *cell("h2o.cpp, full", 20.0, 2),
            Record(TABLE, "OPT, 512 + 64", "", "memory", (4.0 * 2**20,)),
            *cell("h2o.cpp, hh=0.2", 80.0, 7, 64),
            Record(TABLE, "OPT, 512 + 32", "baseline", "absent", note="too large"),
            Record(TABLE, "OPT, 512 + 64", "baseline", "absent", note="larger still"),
            Record(ARRIVALS, "OPT", "", "requests/s", (1.5,)),
            Record(ARRIVALS, "OPT", "static", "sequences", (2.0,)),
            Record(ARRIVALS, "OPT", "static", "tokens/s", (99.0,)),
            Record(ARRIVALS, "OPT", "static", "seconds to the first token", (1.0, 2.0, 3.0)),
            Record(ARRIVALS, "OPT", "static", "seconds between tokens, p50 and p99", (0.01, 0.5)),
        ]
    )
    head = "| OPT in 4 MiB | 512 + 32: sequences | tokens/s | 512 + 64: sequences | tokens/s |"
    assert f"{head} resident MiB |" in page
    assert "| h2o.cpp, hh=0.2 | 9 | 60.0 | 7 | 80.0 | 12 |" in page
    assert "| h2o.cpp, full | 2 | 20.0 **3.00x** |  |  | 5 |" in page
    assert "- baseline on OPT, 512 + 32: too large" in page
    assert "larger still" not in page
    assert "| static | 2 | 99 | 2.00 s | 2.98 s | 10.0 ms | 500.0 ms |" in page
