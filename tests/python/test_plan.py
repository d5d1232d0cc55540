"""Plans: predictions compared with hand calculation and a simulation, and the choice."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_cpp import BUNDLED_MODEL, Generator, _core, plan
from h2o_cpp.cli import main
from h2o_cpp.measure.machine import storage_bandwidth
from h2o_cpp.measure.planner import sizes_of
from h2o_cpp.measure.prediction import (
    CLOSE,
    Candidate,
    Experts,
    Job,
    Sizes,
    Speeds,
    candidates,
    choose,
    placements,
)
from h2o_cpp.model.session import open_model
from support.needs import needs

# Round numbers: a layer takes one second to read from memory, ten from storage.
SIZES = Sizes(
    layers=(100,) * 4,
    others=50,
    others_read=20,
    layer_flops=1000,
    output_flops=100,
    row_bytes=1,
    logits_bytes=1,
)
JOB = Job(prompt=8, n=12, n_batch=4, slab_bytes=30, kv_read=10.0)
SPEEDS = Speeds(memory=100.0, storage=10.0, flops=1000.0)
MIXTURE = Path(__file__).parents[1] / "data" / "golden" / "qwen3moe.gguf"
GIVEN: dict[str, Any] = {"memory_bandwidth": 4e10, "storage_bandwidth": 1e9, "flops": 2e11}


def find(found: list[Candidate], sequences: int, streamed: int = 0) -> Candidate:
    (candidate,) = (c for c in found if (c.sequences, c.streamed_layers) == (sequences, streamed))
    return candidate


def test_resident_plan_matches_hand_calculation() -> None:
    found = candidates(SIZES, JOB, SPEEDS, 1000)
    # A prompt is two chunks, so a sequence takes 14 passes; each reads 420 bytes of weights.
    # It computes 20 tokens of 1000 FLOPs, 14 rows of logits of 100 and reads 12 x 10 bytes of KV.
    per_sequence = 20 + 1.4 + 1.2
    candidate = find(found, 1)
    assert candidate.weight_seconds == pytest.approx(4.2)
    assert candidate.arithmetic_seconds == pytest.approx(21.4 / 14)
    assert candidate.cache_seconds == pytest.approx(1.2 / 14)
    assert candidate.storage_seconds == 0
    assert candidate.tokens_per_second == pytest.approx(12 / (14 * 4.2 + per_sequence))
    # Four sequences share the weights.
    assert find(found, 4).tokens_per_second == pytest.approx(12 / (14 / 4 * 4.2 + per_sequence))
    # A pass takes at most one chunk, so with more than seven a sequence still takes two passes.
    for k in (8, 16):
        assert find(found, k).tokens_per_second == pytest.approx(12 / (2 * 4.2 + per_sequence))
    # Memory: 450 bytes of weights, k slabs of 30, 4 + k - 1 rows, max(32, k) rows of logits.
    assert candidate.bytes == 450 + 30 + 4 + 32
    assert max(c.sequences for c in found if not c.streamed_layers) == 16
    assert 450 + 16 * 30 + 19 + 32 <= 1000 < 450 + 17 * 30 + 20 + 32


def test_streamed_layers_plan_matches_hand_calculation() -> None:
    # One layer is resident, three are streamed. Four sequences fit: 50 + 2 x 100 + 100 of weights.
    found = candidates(SIZES, JOB, SPEEDS, 350 + 4 * 30 + 7 + 32)
    candidate = find(found, 4, streamed=3)
    assert (candidate.weight_bytes, candidate.streamed_bytes) == (350, 300)
    # 3.5 passes per sequence. A layer computes in (4 + 20 / 3.5 + 1.2 / 3.5) / 4 = 2.514 s, the
    # rest in 0.2 + 1.4 / 3.5 = 0.6 s. Two reads of 10 s overlap with one layer each, the third
    # with the last layer, the rest and the resident layer.
    layer = (4 + 20 / 3.5 + 1.2 / 3.5) / 4
    wait = 3 * 10 - 2 * layer - (2 * layer + 0.6)
    assert candidate.storage_seconds == pytest.approx(wait)
    assert candidate.pass_seconds == pytest.approx(4 * layer + 0.6 + wait)
    assert candidate.tokens_per_second == pytest.approx(12 / (3.5 * (4 * layer + 0.6 + wait)))


def simulated_pass(n_layers: int, m: int, layer: float, rest: float, load_seconds: float) -> float:
    """Seconds of a pass in steady state; reading the next layer starts on entering a layer."""
    now, loaded_at, ends = 0.0, load_seconds, []
    for _ in range(4):
        for i in range(n_layers):
            if i >= n_layers - m:
                now = max(now, loaded_at)
                loaded_at = now + load_seconds
            now += layer
        now += rest
        ends.append(now)
    return ends[-1] - ends[-2]


@given(
    n_layers=st.integers(3, 9),
    storage=st.floats(1, 1000),
    flops=st.floats(100, 1e5),
    memory=st.integers(450, 3000),
)
def test_pass_seconds_match_a_simulation(
    n_layers: int, storage: float, flops: float, memory: int
) -> None:
    sizes = replace(SIZES, layers=(100,) * n_layers)
    speeds = Speeds(100.0, storage, flops)
    for candidate in candidates(sizes, JOB, speeds, memory):
        assert candidate.bytes <= memory
        if not candidate.streamed_layers:
            assert candidate.storage_seconds == 0
            continue
        passes = max(2, 14 / candidate.sequences)
        layers = n_layers + (20_000 / flops + 1.2) / passes
        rest = 0.2 + 1400 / flops / passes
        expected = simulated_pass(
            n_layers, candidate.streamed_layers, layers / n_layers, rest, 100 / storage
        )
        assert candidate.pass_seconds == pytest.approx(expected)


@given(
    memory=st.integers(400, 5000),
    slab=st.integers(1, 400),
    storage=st.floats(1, 1e4),
    flops=st.floats(100, 1e6),
)
def test_choice_uses_least_memory_close_to_the_fastest(
    memory: int, slab: int, storage: float, flops: float
) -> None:
    job = replace(JOB, slab_bytes=slab)
    speeds = Speeds(100.0, storage, flops)
    found = candidates(SIZES, job, speeds, memory)
    if not found:
        assert memory < 250 + slab + 4 + 32
        return
    best, fastest = choose(found), max(candidate.tokens_per_second for candidate in found)
    assert best.tokens_per_second >= CLOSE * fastest
    for candidate in found:  # a smaller candidate is slower than CLOSE allows
        if (candidate.streamed_bytes, candidate.sequences) < (best.streamed_bytes, best.sequences):
            assert candidate.tokens_per_second < CLOSE * fastest
    # More memory or faster storage never lowers the throughput.
    for more in (
        candidates(SIZES, job, speeds, memory + 100),
        candidates(SIZES, job, replace(speeds, storage=2 * storage), memory),
    ):
        assert max(candidate.tokens_per_second for candidate in more) >= fastest * (1 - 1e-12)


def test_choice_depends_on_storage_and_arithmetic() -> None:
    """Memory for one sequence with all weights resident; fast storage pays for two instead."""
    job = replace(JOB, slab_bytes=100)
    memory = 450 + 100 + 4 + 32
    quick = choose(candidates(SIZES, job, Speeds(100.0, 1e6, 1e6), memory))
    assert (quick.streamed_layers, quick.sequences) == (4, 2)  # 250 of weights: two sequences
    slow = choose(candidates(SIZES, job, Speeds(100.0, 10.0, 1e6), memory))
    assert (slow.streamed_layers, slow.sequences) == (0, 1)
    # If arithmetic is the bottleneck, more sequences gain nothing.
    busy = choose(candidates(SIZES, job, Speeds(100.0, 1e6, 10.0), memory))
    assert (busy.streamed_layers, busy.sequences) == (0, 1)


def test_predicted_layers_are_those_that_the_core_streams() -> None:
    """With a candidate's weight_bytes as max_resident, the core streams the predicted layers."""
    model = _core.GgufShards(BUNDLED_MODEL)
    sizes = sizes_of(model, _core.Config(model))
    streaming = {
        candidate.weight_bytes: candidate
        for candidate in candidates(sizes, JOB, SPEEDS, BUNDLED_MODEL.stat().st_size * 3)
    }
    assert {candidate.streamed_layers for candidate in streaming.values()} == {0, 3, 4, 5, 6}
    for n_bytes, candidate in streaming.items():
        loaded = open_model(BUNDLED_MODEL, device="cpu", threads=1, max_resident=n_bytes)
        assert loaded.n_streamed_layers == candidate.streamed_layers
        assert loaded.streamed_bytes == candidate.streamed_bytes


def test_streamed_experts_match_hand_calculation() -> None:
    """80 of each layer's 100 bytes are those of four experts; a token uses one."""
    experts = Experts(count=4, used=1, layers=(80,) * 4)
    sizes = replace(SIZES, experts=experts)
    # 50 + 4 x 20 of resident weights, 80 for one layer's experts, 80 for one expert of each layer.
    assert placements(sizes) == [(4, 450), (2, 370), (1, 290), (0, 210)]
    found = candidates(sizes, replace(JOB, prompt=1, n=1), SPEEDS, 290 + 30 + 4 + 32)
    candidate = found[0]
    assert (candidate.sequences, candidate.streamed_experts, candidate.streamed_layers) == (1, 3, 0)
    # Each pass needs one of four experts, which is in memory one time in four.
    assert candidate.weight_seconds == pytest.approx((4 * 20 + 4 * 20 + 20) / 100)
    assert candidate.streamed_bytes == 60
    assert candidate.storage_seconds == pytest.approx(6)
    assert experts.needed(2) == pytest.approx(4 * (1 - 0.75**2))


def test_predicted_experts_are_those_that_the_core_keeps() -> None:
    model = _core.GgufShards(MIXTURE)
    sizes = sizes_of(model, _core.Config(model))
    assert sizes.experts is not None
    found = placements(sizes)
    assert [n for n, _ in found] == [sizes.experts.count, *range(found[1][0], -1, -1)]
    for n_kept, n_bytes in found:
        loaded = open_model(MIXTURE, device="cpu", threads=1, max_resident=n_bytes)
        assert loaded.n_kept_experts == n_kept
    with pytest.raises(ValueError, match="max_resident"):
        open_model(MIXTURE, device="cpu", threads=1, max_resident=found[-1][1] - 1)


def test_activations_of_experts_count() -> None:
    """A row has a copy per expert that it uses, with the expert's products."""
    model = _core.GgufShards(MIXTURE)
    config = _core.Config(model)
    metadata = model.files[0].metadata()

    def number(key: str) -> int:
        return int(metadata[f"{config.architecture}.{key}"])

    copy = number("embedding_length") + 2 * number("expert_feed_forward_length")
    attention = 2 * (config.n_heads + config.n_kv_heads) * config.head_dim
    row = 2 * number("embedding_length") + attention + number("expert_used_count") * copy
    assert sizes_of(model, config).row_bytes >= 4 * row


def test_arguments_of_a_plan_with_experts_open_a_generator() -> None:
    with Generator(MIXTURE, n_ctx=15) as generator:
        expected = generator.generate([3, 4, 5], max_tokens=5, seed=1).text
    found = plan(MIXTURE, "270KiB", prompt=10, n=5, n_batch=8, threads=1, **GIVEN)
    assert found.chosen.streamed_experts > 0
    assert "experts are read when needed" in found.why
    with Generator(MIXTURE, **found.arguments) as generator:
        assert generator.generate([3, 4, 5], max_tokens=5, seed=1).text == expected


@pytest.mark.parametrize("memory", ["6MiB", "20MiB"])
def test_arguments_of_a_plan_open_a_generator(memory: str) -> None:
    found = plan(BUNDLED_MODEL, memory, prompt=100, n=50, hh=0.2, n_batch=64, threads=1, **GIVEN)
    assert (found.chosen.streamed_layers > 0) == (memory == "6MiB")
    assert ("max_resident" in found.arguments) == (memory == "6MiB")
    with Generator(BUNDLED_MODEL, **found.arguments) as generator:
        assert generator.max_sequences == found.chosen.sequences
        assert generator.n_ctx == 150
        cache_bytes = generator.stats().cache_bytes
        assert 0.9 * found.chosen.cache_bytes <= cache_bytes <= found.chosen.cache_bytes
        texts = generator.generate(["The sea"] * 3, max_tokens=5, seed=1)
    with Generator(BUNDLED_MODEL, n_ctx=150, hh=0.2) as generator:
        expected = generator.generate(["The sea"] * 3, max_tokens=5, seed=1)
    assert [candidate.text for candidate in texts] == [candidate.text for candidate in expected]


def test_smaller_cache_allows_more_sequences() -> None:
    full, h2o = (
        plan(BUNDLED_MODEL, "24MiB", prompt=256, n=256, hh=hh, **GIVEN) for hh in (None, 0.2)
    )
    assert h2o.chosen.sequences > 2 * full.chosen.sequences
    assert h2o.chosen.tokens_per_second > full.chosen.tokens_per_second
    few = plan(BUNDLED_MODEL, "24MiB", prompt=256, n=256, sequences=2, **GIVEN)
    assert few.chosen.sequences == 2
    assert few.why.endswith("There are no more prompts.")


def test_missing_speeds_are_measured() -> None:
    speeds = {key: GIVEN[key] for key in ("storage_bandwidth",)}  # needs O_DIRECT to measure
    found = plan(BUNDLED_MODEL, "12MiB", prompt=32, n=8, threads=1, **speeds)
    assert 1e8 < found.speeds.memory < 1e13
    assert 1e7 < found.speeds.flops < 1e14
    assert found.chosen in found.candidates


def _has_o_direct() -> bool:
    with tempfile.NamedTemporaryFile() as file:
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        except (AttributeError, OSError):
            return False
    return True


@needs("a file system with O_DIRECT", _has_o_direct())
def test_storage_bandwidth(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(5 << 20))
    assert storage_bandwidth(file) > 0
    file.write_bytes(b"")
    with pytest.raises(OSError, match="the file is empty"):
        storage_bandwidth(file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "1MiB"}, "memory='1MiB' is 1048576 bytes, expected at least "),
        ({"memory": "much"}, "memory='much', expected bytes or a size"),
        ({"prompt": 0}, "prompt=0, expected an integer"),
        ({"n": -1}, "n=-1, expected an integer"),
        ({"n": 10**6}, "are 1000256 tokens, expected at most the trained 2048"),
        ({"sequences": 0}, "sequences=0, expected an integer"),
        ({"threads": -1}, "threads=-1, expected an integer"),
        ({"threads": 10**11}, "threads=100000000000, expected an integer"),
        ({"hh": 0.0001}, "keeps no token"),
        ({"flops": 0}, "flops=0, expected a positive number per second"),
        ({"flops": float("nan")}, "flops=nan, expected a positive number per second"),
        ({"storage_bandwidth": "fast"}, "storage_bandwidth='fast', expected a number"),
    ],
)
def test_invalid_arguments(options: dict[str, Any], message: str) -> None:
    given = {"memory": "20MiB", "prompt": 256, "n": 64, **GIVEN, **options}
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        plan(BUNDLED_MODEL, **given)
    assert message in str(error.value)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(BUNDLED_MODEL), "--memory", "6MiB", "--prompt", "100", "-n", "50"]
    command += ["--hh", "0.2", "--memory-bandwidth", "40GB", "--storage-bandwidth", "1GB"]
    command += ["--gflops", "200", "--n-batch", "64"]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "memory 40.0 GB/s, storage 1.00 GB/s, arithmetic 200 GFLOP/s" in table
    assert "plan: --device cpu --n-ctx 150 --max-sequences" in table
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (chosen,) = (
        candidate for candidate in document["candidates"] if candidate == document["chosen"]
    )
    assert f"| **{chosen['tokens_per_second']:.1f}** |" in table
    assert f"--max-resident {document['arguments']['max_resident']}" in table
    assert main(["plan", str(BUNDLED_MODEL), "--memory", "1KiB"]) == 2
    assert "error: --memory '1KiB' is 1024 bytes" in capsys.readouterr().err
