"""The GPU benchmarks, run on the CPU with small models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from h2o_bench import gpu_machine
from h2o_bench.engines.h2o import H2o
from h2o_bench.gpu import Bench, measure_prefill, measure_scores
from h2o_bench.gpu_plan import QUICK
from h2o_bench.gpu_report import render_gpu
from h2o_bench.gpu_sections import MACHINE, PREFILL, SCORES
from h2o_bench.models import Models
from h2o_bench.records import Record, Results
from h2o_bench.report import values_of
from h2o_bench.shapes import SHAPES
from h2o_bench.texts import Texts
from h2o_cpp import _core
from h2o_cpp.model.policy import Policy
from test_bench_synthetic import small


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setitem(SHAPES, "small llama", small("TinyLlama-1.1B"))
    monkeypatch.setitem(SHAPES, "small opt", small("OPT-1.3B"))
    plan = replace(QUICK, changes={}, rounds=2, shape="small opt", slots=(16, 64), n_steps=24)
    messages: list[str] = []
    return Bench(plan, Models(tmp_path), Results(tmp_path / "gpu.jsonl"), "cpu", messages.append)


def test_scores_and_prefill(bench: Bench, tmp_path: Path) -> None:
    measure_scores(bench)
    label = "small llama Q8_0, 64 tokens"
    measure_prefill(bench, bench.model("small llama", "Q8_0"), label, 64)
    records = list(bench.results)
    assert not [record for record in records if not record.values]
    assert not list(tmp_path.glob("*.gguf"))  # they are deleted once loaded

    steps = values_of(records, SCORES)["small opt, batch 2, 64 slots"]
    assert len(steps["window"]["step seconds"]) == len(steps["h2o"]["step seconds"]) == 24
    assert steps["h2o"]["bytes"] == [2 * 65 * 8 * 256 * 2 * 2]

    prefill = values_of(records, PREFILL)[label]
    assert len(prefill["full"]["seconds"]) == len(prefill["h2o"]["seconds"]) == bench.plan.rounds
    # 8 layers of width 256 with 2 KV heads of 32, feed-forward 512; two operations per weight.
    layers = 2 * 64 * 8 * (2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 512)
    # Each of the 64 * 65 / 2 query-key pairs: a product of 32 with K and one with V.
    assert prefill["h2o.cpp"]["flops"] == [layers + 64 * 65 / 2 * 8 * 8 * 32 * 4]


def sample_records() -> Iterator[Record]:
    yield Record(MACHINE, "A GPU", "torch", "copy", (4e12,))
    yield Record(MACHINE, "A GPU", "torch", "f16", (800e12,))
    yield Record(MACHINE, "shape F16", "h2o.cpp", "start", (2.0,), "0.1 cuda (A GPU)")
    for slots, window, h2o in ((128, 3.0, 3.0), (4096, 4.0, 4.02)):
        for name, milliseconds in (("window", window), ("h2o", h2o)):
            model = f"shape, batch 1, {slots} slots"
            yield Record(SCORES, model, name, "step seconds", (milliseconds * 1e-3,))
            yield Record(SCORES, model, name, "bytes", (slots * 1e6,))
    for name, value in (("full", 0.5), ("h2o", 0.6)):
        yield Record(PREFILL, "shape F16, 2048 tokens", name, "seconds", (value,))
    yield Record(PREFILL, "shape F16, 2048 tokens", "h2o.cpp", "flops", (200e12,))


def test_page() -> None:
    page = render_gpu([*sample_records()])
    assert "h2o.cpp 0.1 cuda (A GPU)." in page
    assert "\nA GPU." in page
    row = "| shape, batch 1, 4096 slots | 4000 (4000 to 4000) | 4020 (4020 to 4020) | +0.5% |"
    assert row in page
    # 3968 MB more take 1 ms longer.
    assert "| shape, batch 1 | window | 3.97 GB in 1000 us | 3968 (99%) |" in page
    assert "| shape F16, 2048 tokens | 4096 | 3413 | 500.0 | 400 (50%) |" in page


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


def test_engine_checks_logits(tiny_opt: Path) -> None:
    engine = H2o(str(tiny_opt), threads=1, n_ctx=32)
    assert len(engine.decode(10, 4)) == 4
    engine._logits = np.full(3, np.nan, np.float32)
    with pytest.raises(FloatingPointError):
        engine._checked([])


def test_missing_device() -> None:
    assert gpu_machine.describe("cpu") is None
    assert gpu_machine.memory_used("cpu") is None
    with pytest.raises(RuntimeError):
        gpu_machine.gpu_limits("cuda:99")
