"""The engine comparison: subprocesses that take turns, and equal memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_bench.baselines import ik_llama_cpp, transformers
from h2o_bench.comparison import Baseline, Request, compare
from h2o_bench.engine_process import EngineError, EngineProcess
from h2o_bench.engines.h2o import H2o
from h2o_bench.measurements.baselines import _use
from h2o_bench.measurements.throughput import Entry, entries, run
from h2o_bench.models import Models
from support.needs import packages
from support.shapes import SHAPES, small


@pytest.fixture(autouse=True)
def _fake_engine_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, *filter(None, sys.path)]))


def fake(name: str = "fake", **options: object) -> Baseline:
    return Baseline(name, "fake_engine", options)


def test_engine_measures_prefill_and_decode() -> None:
    with EngineProcess("fake_engine", {}) as engine:
        assert engine.version == "7"
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
    one = ik_llama_cpp(Path("model.gguf"), program, 3, repack=True)
    with EngineProcess(one.module, one.options) as engine:
        assert engine.version == "3-1, repacked"
        answer = engine.prefill(11)
        assert answer.seconds == [11.0]
        assert answer.peak_rss_bytes > 1 << 20
        assert engine.decode(11, 3).seconds == [14 / 3] * 3
        with pytest.raises(EngineError, match="a single sequence"):
            engine.batch(2, 3, 4)
    other = ik_llama_cpp(Path("other.gguf"), program, 3, repack=False)
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


def test_engines_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that fail are absent; longer prompts are read in the first round only."""
    turns: list[tuple[str, str]] = []
    ask = EngineProcess._ask

    def noted(engine: EngineProcess, request: Mapping[str, Any], key: str | None) -> Any:
        if key is None:
            turns.append((engine.version, next(iter(request))))
        return ask(engine, request, key)

    monkeypatch.setattr(EngineProcess, "_ask", noted)
    engines = [fake("a"), fake("b", version="8"), fake("broken", fault="cannot open")]
    engines += [fake("failing", fault="fails"), Baseline("none", "", {}, absent="not made")]
    requests = [Request(7), Request(2, 5, repeats=2), Request(9)]
    rows = {row["engine"]: row for row in compare(engines, requests, 2, model="m", context=3)}
    warm_ups, both = [("7", "decode"), ("8", "decode"), ("7", "decode")], ["7", "8"]
    two = [(v, "prefill") for v in both] + [(v, "decode") for v in both for _ in range(2)]
    assert turns == [*warm_ups, *two, *((v, "prefill") for v in both), *two]
    assert {name: row["absent"] for name, row in rows.items() if "absent" in row} == {
        "broken": "ValueError: no such model",
        "failing": "RuntimeError: out of luck",
        "none": "not made",
    }
    found = rows["a"]
    assert (found["model"], found["context"], found["version"]) == ("m", 3, "7")
    assert len(found["prefill 7, tokens/s"]) == 2
    assert len(found["decode after 5, tokens/s"]) == len(found["ms per step"]) == 4
    assert len(found["prefill 9, tokens/s"]) == 1
    assert found["MiB"] > 1


def test_use_of_bandwidth_and_arithmetic() -> None:
    """200 tokens/s of 2 GFLOP; 40 tokens/s of 1 GB, of 50 GB/s."""
    first, decode = Request(512), Request(32, 128)
    rates = {first.measure: [190.0, 200.0, 210.0], decode.measure: [40.0]}
    found = _use({"engine": "h2o.cpp", **rates}, first, decode, (1e9, 2e9), 50e9)
    assert found == {"GB/s": 40, "of reading, %": 80, "GFLOP/s": 400}
    assert not _use({"engine": "llama.cpp", **rates}, first, decode, (1e9, 2e9), 50e9)


def test_batch_tokens_are_checked() -> None:
    with EngineProcess("fake_engine", {}) as engine:
        assert engine.batch(3, 5, 4).seconds == [0.5]
    with (
        EngineProcess("fake_engine", {"fault": "miscounts"}) as engine,
        pytest.raises(EngineError, match="1 steps and 21 tokens, expected 1 and 24"),
    ):
        engine.batch(3, 5, 4)


def test_h2o_batch_is_limited_to_its_sequences(llama: Path) -> None:
    options = {"path": str(llama), "threads": 1, "n_ctx": 40, "hh": 12, "n_sequences": 3}
    with EngineProcess("h2o_bench.engines.h2o", options) as engine:
        assert engine.batch(3, 9, 5).seconds[0] > 0  # the engine checks the token counts
    with (
        EngineProcess("h2o_bench.engines.h2o", options) as engine,
        pytest.raises(EngineError, match="sequence 3"),
    ):
        engine.batch(4, 9, 5)


def test_h2o_checks_logits(tiny_opt: Path) -> None:
    engine = H2o(str(tiny_opt), threads=1, n_ctx=32)
    assert len(engine.decode(10, 4)) == 4
    engine._logits = np.full(3, np.nan, np.float32)
    with pytest.raises(FloatingPointError):
        engine._checked([])


@packages("torch", "transformers")
def test_transformers_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", small("OPT-1.3B", num_hidden_layers=2))
    one = transformers("small", 1, "float32")
    with EngineProcess(one.module, one.options) as engine:
        assert len(engine.decode(5, 3).seconds) == 3  # the engine checks the token counts
        assert len(engine.batch(2, 5, 3).seconds) == 1


def test_sequences_that_fit_in_memory() -> None:
    entry = Entry(Baseline("one", "module", {}), weight_bytes=100, text_bytes=30.0)
    assert [entry.sequences(memory) for memory in (50, 129, 130, 189, 190)] == [0, 0, 1, 2, 3]
    absent = run(entry, 129, 4, 4)["absent"]
    assert absent == "weights and one sequence take 0 MiB"


def test_throughput_in_equal_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For OPT, which all engines but llama.cpp support."""
    monkeypatch.setitem(SHAPES, "small", small("OPT-1.3B", num_hidden_layers=2))
    models = Models(tmp_path)
    path = models.gguf("small", "F16")
    memory = 2 * path.stat().st_size
    found = [*entries(models, "small", path, 20, 3, memory, 1)]
    names = ["h2o.cpp, full", "h2o.cpp, hh=0.2", "transformers bfloat16", "transformers float32"]
    assert [one.baseline.name for one in found] == [
        *names,
        "CTranslate2 int8",
        "CTranslate2 float32",
    ]
    full, h2o = (run(one, memory, 20, 3) for one in found[:2])
    assert h2o["sequences"] > full["sequences"] > 0
    assert all(row["tokens/s"][0] > 0 for row in (full, h2o))
    assert full["computed MiB"] <= memory / 2**20
