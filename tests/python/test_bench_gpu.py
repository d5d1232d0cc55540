"""The GPU benchmarks, run on the CPU with small models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from h2o_bench import gpu_machine
from h2o_bench.engines.h2o import H2o
from h2o_bench.gpu import SECTIONS, Bench
from h2o_bench.gpu_plan import QUICK
from h2o_bench.gpu_report import render_gpu
from h2o_bench.gpu_sections import DECODE, EVICTION, MACHINE, PREFILL, SCORES
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
    plan = replace(
        QUICK,
        changes={},
        rounds=2,
        shapes=["small llama"],
        baselines=False,
        shape="small opt",
        prompt=48,
        n_generate=32,
        n_sample=4,
        slots=(16, 64),
        n_steps=24,
        prompts=(64, 128),
        models=[("small llama", "Q8_0")],
    )
    messages: list[str] = []
    return Bench(plan, Models(tmp_path), Results(tmp_path / "gpu.jsonl"), "cpu", messages.append)


def test_sections_record_measurements(bench: Bench, tmp_path: Path) -> None:
    for section in (DECODE, EVICTION, SCORES, PREFILL):
        SECTIONS[section](bench)
    records = list(bench.results)
    assert not [record for record in records if not record.values]
    assert not list(tmp_path.glob("*.gguf"))  # they are deleted once loaded

    (engines,) = values_of(records, DECODE).values()
    assert set(engines) == {"h2o.cpp F16", "h2o.cpp Q4_K_M"}
    assert len(engines["h2o.cpp F16"]["decode 16"]) == bench.plan.rounds
    # 8 layers of width 256 with 2 KV heads of 32, feed-forward 512; two bytes per weight.
    matrices = 8 * (2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 512) + 256 * 1000
    cached = 8 * (16 + 4.5) * 2 * 2 * 32 * 2  # eight tokens attend to 17 to 24
    found = engines["h2o.cpp F16"]["bytes per token"]
    assert found == [2 * matrices + 4 * 17 * 256 + cached]  # + norms in f32

    eviction = values_of(records, EVICTION)
    full, bounded = (eviction["small opt, batch 3"][name] for name in ("full", "hh=0.2"))
    assert "decode seconds" in full  # measured for every token
    assert "decode seconds" not in eviction["small opt, batch 1"]["full"]
    # 16 of 80 tokens and the one being decoded: 17 slots, each with a position and a score.
    assert bounded["cache bytes"][0] < full["cache bytes"][0] * 18 / 80
    equal = [label for label, found in eviction.items() if "equal to" in found["hh=0.2"]]
    (n,) = (int(label.split()[-1]) for label in equal)
    assert n * bounded["cache bytes"][0] / 3 <= full["cache bytes"][0]
    assert (n + 1) * bounded["cache bytes"][0] / 3 > full["cache bytes"][0]

    steps = values_of(records, SCORES)["small opt, batch 2, 64 slots"]
    assert len(steps["window"]["step seconds"]) == len(steps["h2o"]["step seconds"]) == 24
    assert steps["h2o"]["bytes"] == [2 * 65 * 8 * 256 * 2 * 2]

    prefill = values_of(records, PREFILL)["small llama Q8_0, 64 tokens"]
    assert len(prefill["full"]["seconds"]) == bench.plan.rounds
    layers = 2 * 64 * (matrices - 256 * 1000)
    # Each of the 64 * 65 / 2 query-key pairs: a product of 32 with K and one with V.
    assert prefill["h2o.cpp"]["flops"] == [layers + 64 * 65 / 2 * 8 * 8 * 32 * 4]

    page = render_gpu(records)
    for title in ("1. Decode", "2. H2O against", "3. What scores cost", "4. Prefill"):
        assert f"## {title}" in page


def sample_records() -> Iterator[Record]:
    yield Record(MACHINE, "A GPU", "torch", "copy", (4e12,))
    yield Record(MACHINE, "A GPU", "torch", "f16", (800e12,))
    yield Record(MACHINE, "shape F16", "h2o.cpp", "start", (2.0,), "0.1 cuda (A GPU)")
    yield Record(DECODE, "shape", "h2o.cpp F16", "decode 128", (250.0,))
    yield Record(DECODE, "shape", "h2o.cpp F16", "decode 128 rss", (7.0,))
    yield Record(DECODE, "shape", "h2o.cpp F16", "step seconds after 128", (0.004,))
    yield Record(DECODE, "shape", "h2o.cpp F16", "bytes per token", (14e9,))
    yield Record(DECODE, "shape", "transformers", "decode 128", (50.0,))
    yield Record(DECODE, "shape", "compiled", "absent", note="no compiler")
    for name, batch, prefill, whole, extrapolated, n_bytes in (
        ("full", 24, 10.0, 90.0, 91.0, 48.0),
        ("hh=0.2", 24, 12.0, 38.0, None, 12.0),
        ("hh=0.2", 96, 48.0, None, 92.4, 48.0),
    ):
        model = f"shape, batch {batch}"
        yield Record(EVICTION, model, name, "prefill seconds", (prefill,))
        if whole is not None:
            yield Record(EVICTION, model, name, "decode seconds", (whole,))
        if extrapolated is not None:
            yield Record(EVICTION, model, name, "decode seconds, extrapolated", (extrapolated,))
        yield Record(EVICTION, model, name, "prompt", (2048.0,))
        yield Record(EVICTION, model, name, "tokens", (2048.0,))
        yield Record(EVICTION, model, name, "cache bytes", (n_bytes * 2**30,))
        yield Record(EVICTION, model, name, "device bytes", ((n_bytes + 14) * 2**30,))
    yield Record(EVICTION, "shape, batch 96", "hh=0.2", "equal to", (24.0,))
    yield Record(EVICTION, "shape, batch 64", "full", "absent", note="out of memory")
    for slots, window, h2o in ((128, 3.0, 3.0), (4096, 4.0, 4.02)):
        for name, milliseconds in (("window", window), ("h2o", h2o)):
            model = f"shape, batch 1, {slots} slots"
            yield Record(SCORES, model, name, "step seconds", (milliseconds * 1e-3,))
            yield Record(SCORES, model, name, "bytes", (slots * 1e6,))
    for name, value in (("full", 0.5), ("window", 0.5), ("h2o", 0.6)):
        yield Record(PREFILL, "shape F16, 2048 tokens", name, "seconds", (value,))
    yield Record(PREFILL, "shape F16, 2048 tokens", "h2o.cpp", "flops", (200e12,))


def test_page() -> None:
    page = render_gpu([*sample_records()])
    assert "h2o.cpp 0.1 cuda (A GPU)." in page
    assert "\nA GPU." in page
    # 14 GB in 4 ms, of 4 TB/s.
    ours = "| shape F16 | 250 | 4.000 | 3500 (88%) |"
    assert f"{ours} 50.0 **5.00x** |" in page
    assert "- compiled on shape: no compiler" in page
    # 24 x 2048 tokens in 100 s, 90 s of it decode; in half the time; 96 x 2048 in 140.4 s.
    full = "| 24 | full | 100.00 | 10.00 | 90.00 | 91.00 | 491.5 | 546.1 | 48.0 | 62.0 |  |"
    assert full in page
    bounded = "| 24 | hh=0.2 | 50.00 | 12.00 | 38.00 |  | 983.0 | 1293.5 | 12.0 | 26.0 | 2.00x |"
    assert bounded in page
    equal = "| 96 | hh=0.2 | 140.40 | 48.00 |  | 92.40 | 1400.3 | 2127.8 | 48.0 | 62.0 |"
    assert f"{equal} 2.85x batch 24 |" in page
    assert "- full on shape, batch 64: out of memory" in page
    row = "| shape, batch 1, 4096 slots | 4000 (4000 to 4000) | 4020 (4020 to 4020) | +0.5% |"
    assert row in page
    # 3968 MB more take 1 ms longer.
    assert "| shape, batch 1 | window | 3.97 GB in 1000 us | 3968 (99%) |" in page
    prompt = "4096 | 4096 | 3413"
    assert f"| shape F16, 2048 tokens | {prompt} | 500.0 | 400 (50%) | +20.0% |" in page


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


def test_engine_decodes_greedily(tiny_opt: Path) -> None:
    engine = H2o(str(tiny_opt), threads=1, n_ctx=32, greedy=True)
    for _ in range(2):
        assert len(engine.decode(10, 4)) == 4
        assert engine.n_tokens == 14
    engine._logits = np.full(3, np.nan, np.float32)
    with pytest.raises(FloatingPointError):
        engine._checked([])


def test_missing_device() -> None:
    assert gpu_machine.describe("cpu") is None
    assert gpu_machine.memory_used("cpu") is None
    with pytest.raises(RuntimeError):
        gpu_machine.gpu_limits("cuda:99")
