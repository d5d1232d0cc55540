"""`h2o-cpp bench`: measurements, and the hardware limits they are compared with."""

from __future__ import annotations

import io
import json
import os
import platform
import resource
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

import h2o_cpp
from h2o_cpp import Generator, _core
from h2o_cpp.cli import main
from h2o_cpp.measure import machine
from h2o_cpp.measure.machine import peak_rss_bytes
from h2o_cpp.measure.traffic import Weight, decode_weight_bytes, kv_bytes, prefill_flops

# The bundled model, see models/README.md: 6 layers, width 192, feed-forward width 768.
N_LAYERS, WIDTH, N_FF = 6, 192, 768
FAST = ["--prompt", "40", "--context", "20", "-n", "5", "--rounds", "2"]
FAST += ["--device", "cpu", "--threads", "1"]


@pytest.fixture(scope="module")
def found() -> Any:
    """The JSON results of the bundled model with the full cache."""
    with redirect_stdout(io.StringIO()) as out:
        assert main(["bench", *FAST, "--json"]) == 0
    return json.loads(out.getvalue())


def test_json_describes_model_and_run(tiny_opt: Path, found: Any) -> None:
    assert found["model"] == "tiny-opt.gguf"
    assert found["version"] == h2o_cpp.__version__
    assert found["backend"] in [f"cpu ({isa}, 1 thread)" for isa in _core.isas()]
    assert found["types"] == {"Q8_0": 37, "F32": 63}
    counts = ("rounds", "prompt_tokens", "context_tokens", "decode_tokens")
    assert [found[name] for name in counts] == [2, 40, 20, 5]
    for kind in ("prefill", "decode"):
        low, high = found[f"{kind}_spread"]
        assert 0 < low <= found[f"{kind}_tokens_per_second"] <= high
    with Generator(tiny_opt) as generator:
        stats = generator.stats()
    assert found["cache_bytes"] == found["full_cache_bytes"] == stats.cache_bytes
    tensors = GGUFReader(tiny_opt).tensors
    assert found["weight_bytes"] == sum(tensor.n_bytes for tensor in tensors)
    assert found["peak_rss_bytes"] > found["weight_bytes"]
    assert found["load_seconds"] > 0


def test_bytes_and_flops_per_token(tiny_opt: Path, found: Any) -> None:
    # The embedding is also the output matrix; of the learned positions only one row is read.
    weights = sum(t.n_bytes for t in GGUFReader(tiny_opt).tensors if "position" not in t.name)
    assert found["decode_weight_bytes"] == weights
    # The five tokens attend to 21 to 25 tokens, 23 on average; K and V in f16.
    assert found["decode_kv_bytes"] == N_LAYERS * 23 * WIDTH * 2 * 2
    # Q, K, V, output; up, down
    assert found["prefill_flops"] == 2 * N_LAYERS * (4 * WIDTH**2 + 2 * WIDTH * N_FF)
    read = (weights + found["decode_kv_bytes"]) * found["decode_tokens_per_second"]
    assert found["read_bandwidth"] > 0
    assert found["read_bandwidth_fraction"] == pytest.approx(read / found["read_bandwidth"])
    computed = found["prefill_flops"] * found["prefill_tokens_per_second"]
    assert found["matmul_fraction"] == pytest.approx(computed / found["matmul_flops"])


def test_bounded_cache(tiny_opt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bounded = ["--hh", "10", "--policy", "sinks", "--kv-dtype", "q8_0,f16"]
    assert main(["bench", *FAST, *bounded, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "n_sinks=4" in found["policy"]
    assert found["kv_dtype"] == "q8_0,f16"
    # The cache keeps ten tokens; a q8_0 block of 32 values takes 34 bytes.
    assert found["decode_kv_bytes"] == N_LAYERS * 10 * (WIDTH * 34 // 32 + WIDTH * 2)
    options = {"hh": 10, "policy": "sinks", "kv_dtype": ("q8_0", "f16")}
    with Generator(tiny_opt, **options) as generator:  # type: ignore[arg-type]
        assert found["cache_bytes"] == generator.stats().cache_bytes


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *FAST]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny-opt.gguf on ")
    for words in (
        "prefill of 40 tokens",
        "decode of 5 after 20",
        "of reading",
        "of numpy's matrix product",
        "MiB",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "3000"], "3000 more tokens"),
        (["--context", "2047", "-n", "2"], "room for"),
        (["-n", "0"], "--max-tokens 0, expected"),
        (["--prompt", "0"], "--prompt 0, expected"),
        (["--context", "-1"], "--context -1, expected"),
        (["--rounds", "0"], "--rounds 0, expected"),
        (["-m", "nowhere.gguf"], "nowhere.gguf"),
    ],
)
def test_errors(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["bench", *FAST, *options])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert status == (2 if message.startswith("-") else 1)


def test_weight_bytes_and_flops_with_untied_output() -> None:
    """The embedding does not count then: it is only looked up."""
    tensors = [
        Weight("token_embd.weight", "F16", (10, 4), 80),
        Weight("blk.0.attn_q.weight", "F16", (4, 4), 32),
        Weight("blk.0.attn_norm.weight", "F32", (4,), 16),
        Weight("output.weight", "F16", (10, 4), 80),
    ]
    assert decode_weight_bytes(tensors) == 32 + 16 + 80
    assert decode_weight_bytes(tensors[:-1]) == 80 + 32 + 16
    assert prefill_flops(tensors) == 2 * 16
    experts = Weight("blk.0.ffn_up_exps.weight", "F16", (8, 4, 4), 256)
    assert decode_weight_bytes([*tensors, experts], 0.25) == 32 + 16 + 80 + 64
    assert prefill_flops([*tensors, experts], 0.25) == 2 * 16 + 2 * 128 // 4


def test_kv_bytes_per_token() -> None:
    assert kv_bytes(2, 64, "f32") == 2 * 64 * 2 * 4
    assert kv_bytes(2, 64, ("q8_0", "q4_0")) == 2 * (64 / 32) * (34 + 18)


def test_read_bandwidth_rejects_invalid_arguments() -> None:
    for nbytes, threads, passes in ((63, 1, 1), (64, 0, 1), (64, 1, 0)):
        with pytest.raises(ValueError, match="read_bandwidth"):
            _core.read_bandwidth(nbytes, threads=threads, passes=passes)
    with pytest.raises(MemoryError):
        _core.read_bandwidth(1 << 60, threads=1, passes=1)
    for threads in (1, 3):
        assert _core.read_bandwidth(64, threads=threads, passes=1) > 0


def test_machine_without_calls_of_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert machine.n_processors() == os.cpu_count()
    unit = {"Linux": 1, "Darwin": 1, "FreeBSD": 1024}
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for system in ("Darwin", "FreeBSD"):
        monkeypatch.setattr(platform, "system", lambda name=system: name)
        assert peak_rss_bytes() == pytest.approx(rss * unit[system], rel=0.02)
    monkeypatch.setitem(sys.modules, "resource", None)  # Windows
    assert peak_rss_bytes() is None


def test_peak_rss_equals_getrusage() -> None:
    expected = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # The kernel counts pages per thread and sums the counts only occasionally.
    assert peak_rss_bytes() == pytest.approx(expected, rel=0.02)
