"""Plans: predictions against hand calculation and a simulation, and the choice."""

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
from h2o_cpp.measure.traffic import weights
from h2o_cpp.model.capacity import ModelShape
from h2o_cpp.model.session import open_model
from support.needs import needs

# Numbers that are easily reckoned with: a layer is read in one second, from storage in ten.
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


def of(found: list[Candidate], sequences: int, streamed: int = 0) -> Candidate:
    (one,) = (c for c in found if (c.sequences, c.streamed_layers) == (sequences, streamed))
    return one


def test_by_hand() -> None:
    found = candidates(SIZES, JOB, SPEEDS, 1000)
    # A prompt is two chunks, so a text is in 14 passes, each of which reads 420 bytes of weights.
    # It takes 20 tokens of 1000 operations, 14 rows of logits of 100 and 12 x 10 bytes of cache.
    own = 20 + 1.4 + 1.2
    one = of(found, 1)
    assert one.weight_seconds == pytest.approx(4.2)
    assert one.arithmetic_seconds == pytest.approx(21.4 / 14)
    assert one.cache_seconds == pytest.approx(1.2 / 14)
    assert one.storage_seconds == 0
    assert one.tokens_per_second == pytest.approx(12 / (14 * 4.2 + own))
    # Four texts share the weights.
    assert of(found, 4).tokens_per_second == pytest.approx(12 / (14 / 4 * 4.2 + own))
    # A pass has one chunk at most, so of more than seven a text still takes two passes.
    for k in (8, 16):
        assert of(found, k).tokens_per_second == pytest.approx(12 / (2 * 4.2 + own))
    # Memory: 450 of weights; beside them k slabs of 30, 4 + k - 1 rows, 32 rows of logits or k.
    assert one.bytes == 450 + 30 + 4 + 32
    assert max(c.sequences for c in found if not c.streamed_layers) == 16
    assert 450 + 16 * 30 + 19 + 32 <= 1000 < 450 + 17 * 30 + 20 + 32


def test_layers_that_take_turns_by_hand() -> None:
    # One stays, three take turns. There is room for four texts: 50 + 2 x 100 + 100 of weights.
    found = candidates(SIZES, JOB, SPEEDS, 350 + 4 * 30 + 7 + 32)
    one = of(found, 4, streamed=3)
    assert (one.weight_bytes, one.streamed_bytes) == (350, 300)
    # 3.5 passes for a text. A layer computes in (4 + 20 / 3.5 + 1.2 / 3.5) / 4 = 2.514 s, the rest
    # in 0.2 + 1.4 / 3.5 = 0.6 s. Two readings of 10 s hide behind one layer each, the third behind
    # the last layer, the rest and the layer that stays.
    layer = (4 + 20 / 3.5 + 1.2 / 3.5) / 4
    wait = 3 * 10 - 2 * layer - (2 * layer + 0.6)
    assert one.storage_seconds == pytest.approx(wait)
    assert one.pass_seconds == pytest.approx(4 * layer + 0.6 + wait)
    assert one.tokens_per_second == pytest.approx(12 / (3.5 * (4 * layer + 0.6 + wait)))


def simulated_pass(n_layers: int, m: int, layer: float, rest: float, bring: float) -> float:
    """Seconds of a pass once it goes on and on: the reader is told the next layer on entering."""
    now, here_at, ends = 0.0, bring, []
    for _ in range(4):
        for i in range(n_layers):
            if i >= n_layers - m:
                now = max(now, here_at)
                here_at = now + bring
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
def test_as_a_simulation(n_layers: int, storage: float, flops: float, memory: int) -> None:
    sizes = replace(SIZES, layers=(100,) * n_layers)
    speeds = Speeds(100.0, storage, flops)
    for one in candidates(sizes, JOB, speeds, memory):
        assert one.bytes <= memory
        if not one.streamed_layers:
            assert one.storage_seconds == 0
            continue
        passes = max(2, 14 / one.sequences)
        layers = n_layers + (20_000 / flops + 1.2) / passes
        rest = 0.2 + 1400 / flops / passes
        expected = simulated_pass(
            n_layers, one.streamed_layers, layers / n_layers, rest, 100 / storage
        )
        assert one.pass_seconds == pytest.approx(expected)


@given(
    memory=st.integers(400, 5000),
    slab=st.integers(1, 400),
    storage=st.floats(1, 1e4),
    flops=st.floats(100, 1e6),
)
def test_what_is_chosen(memory: int, slab: int, storage: float, flops: float) -> None:
    job = replace(JOB, slab_bytes=slab)
    speeds = Speeds(100.0, storage, flops)
    found = candidates(SIZES, job, speeds, memory)
    if not found:
        assert memory < 250 + slab + 4 + 32
        return
    best, most = choose(found), max(one.tokens_per_second for one in found)
    assert best.tokens_per_second >= CLOSE * most
    for one in found:  # less would not do
        if (one.streamed_bytes, one.sequences) < (best.streamed_bytes, best.sequences):
            assert one.tokens_per_second < CLOSE * most
    # More memory, and faster storage, is never worse.
    for more in (
        candidates(SIZES, job, speeds, memory + 100),
        candidates(SIZES, job, replace(speeds, storage=2 * storage), memory),
    ):
        assert max(one.tokens_per_second for one in more) >= most * (1 - 1e-12)


def test_where_it_flips() -> None:
    """Room for one text beside all weights; caches are worth more than weights if storage is."""
    job = replace(JOB, slab_bytes=100)
    memory = 450 + 100 + 4 + 32
    quick = choose(candidates(SIZES, job, Speeds(100.0, 1e6, 1e6), memory))
    assert (quick.streamed_layers, quick.sequences) == (4, 2)  # 250 of weights: two texts
    slow = choose(candidates(SIZES, job, Speeds(100.0, 10.0, 1e6), memory))
    assert (slow.streamed_layers, slow.sequences) == (0, 1)
    # Where arithmetic decides, more texts gain nothing.
    busy = choose(candidates(SIZES, job, Speeds(100.0, 1e6, 10.0), memory))
    assert (busy.streamed_layers, busy.sequences) == (0, 1)


def test_weights_are_those_of_the_core() -> None:
    """Each candidate's max_resident makes the core stream what was predicted."""
    model = _core.GgufShards(BUNDLED_MODEL)
    metadata = model.files[0].metadata()
    shape = ModelShape.of_metadata(metadata)
    assert shape is not None
    sizes = sizes_of(weights(model.files), shape, metadata)
    streaming = {
        one.weight_bytes: one
        for one in candidates(sizes, JOB, SPEEDS, BUNDLED_MODEL.stat().st_size * 3)
    }
    assert {one.streamed_layers for one in streaming.values()} == {0, 3, 4, 5, 6}
    for n_bytes, one in streaming.items():
        loaded = open_model(BUNDLED_MODEL, device="cpu", threads=1, max_resident=n_bytes)
        assert loaded.n_streamed_layers == one.streamed_layers
        assert loaded.streamed_bytes == one.streamed_bytes


def test_experts_by_hand() -> None:
    """Of each layer's 100 bytes 80 are those of four experts, of which a token needs one."""
    experts = Experts(count=4, used=1, layers=(80,) * 4)
    sizes = replace(SIZES, experts=experts)
    # 50 + 4 x 20 of weights that stay, 80 for a layer's experts, and 80 for one of each layer.
    assert placements(sizes) == [(4, 450), (2, 370), (1, 290), (0, 210)]
    found = candidates(sizes, replace(JOB, prompt=1, n=1), SPEEDS, 290 + 30 + 4 + 32)
    one = found[0]
    assert (one.sequences, one.streamed_experts, one.streamed_layers) == (1, 3, 0)
    # Both passes need one expert of four, which is in memory once in four times.
    assert one.weight_seconds == pytest.approx((4 * 20 + 4 * 20 + 20) / 100)
    assert one.streamed_bytes == 60
    assert one.storage_seconds == pytest.approx(6)
    assert experts.needed(2) == pytest.approx(4 * (1 - 0.75**2))


def test_experts_are_those_of_the_core() -> None:
    model = _core.GgufShards(MIXTURE)
    metadata = model.files[0].metadata()
    shape = ModelShape.of_metadata(metadata)
    assert shape is not None
    sizes = sizes_of(weights(model.files), shape, metadata)
    assert sizes.experts is not None
    found = placements(sizes)
    assert [n for n, _ in found] == [sizes.experts.count, *range(found[1][0], -1, -1)]
    for n_kept, n_bytes in found:
        model_of = open_model(MIXTURE, device="cpu", threads=1, max_resident=n_bytes)
        assert model_of.n_kept_experts == n_kept
    with pytest.raises(ValueError, match="max_resident"):
        open_model(MIXTURE, device="cpu", threads=1, max_resident=found[-1][1] - 1)


def test_a_generator_takes_experts() -> None:
    with Generator(MIXTURE, n_ctx=15) as generator:
        expected = generator.generate([3, 4, 5], max_tokens=5, seed=1).text
    found = plan(MIXTURE, "270KiB", prompt=10, n=5, n_batch=8, threads=1, **GIVEN)
    assert found.chosen.streamed_experts > 0
    assert "experts are read when needed" in found.why
    with Generator(MIXTURE, **found.arguments) as generator:
        assert generator.generate([3, 4, 5], max_tokens=5, seed=1).text == expected


@pytest.mark.parametrize("memory", ["6MiB", "20MiB"])
def test_a_generator_takes_it(memory: str) -> None:
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
    assert [one.text for one in texts] == [one.text for one in expected]


def test_less_cache_more_texts() -> None:
    full, h2o = (
        plan(BUNDLED_MODEL, "24MiB", prompt=256, n=256, hh=hh, **GIVEN) for hh in (None, 0.2)
    )
    assert h2o.chosen.sequences > 2 * full.chosen.sequences
    assert h2o.chosen.tokens_per_second > full.chosen.tokens_per_second
    few = plan(BUNDLED_MODEL, "24MiB", prompt=256, n=256, sequences=2, **GIVEN)
    assert few.chosen.sequences == 2
    assert few.why.endswith("There are no more prompts.")


def test_measured() -> None:
    """By what the machine gives, whatever that is."""
    speeds = {key: GIVEN[key] for key in ("storage_bandwidth",)}  # not every file system has it
    found = plan(BUNDLED_MODEL, "12MiB", prompt=32, n=8, threads=1, **speeds)
    assert 1e8 < found.speeds.memory < 1e13
    assert 1e7 < found.speeds.flops < 1e14
    assert found.chosen in found.candidates


def _reads_directly() -> bool:
    with tempfile.NamedTemporaryFile() as file:
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        except (AttributeError, OSError):
            return False
    return True


@needs("a file system with O_DIRECT", _reads_directly())
def test_storage(tmp_path: Path) -> None:
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
        ({"hh": 0.0001}, "keeps no token"),
        ({"flops": 0}, "flops=0, expected a positive number per second"),
        ({"flops": float("nan")}, "flops=nan, expected a positive number per second"),
        ({"storage_bandwidth": "fast"}, "storage_bandwidth='fast', expected a number"),
    ],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    given = {"memory": "20MiB", "prompt": 256, "n": 64, **GIVEN, **options}
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        plan(BUNDLED_MODEL, **given)
    assert message in str(error.value)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(BUNDLED_MODEL), "--memory", "6MiB", "--prompt", "100", "-n", "50"]
    command += ["--hh", "0.2", "--memory-bandwidth", "40GB", "--storage-bandwidth", "1GB"]
    command += ["--gflops", "200", "--n-batch", "64"]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "memory 40.0 GB/s, storage 1.00 GB/s, arithmetic 200 GFLOP/s" in table
    assert "plan: --device cpu --n-ctx 150 --max-sequences" in table
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (chosen,) = (one for one in document["candidates"] if one == document["chosen"])
    assert f"| **{chosen['tokens_per_second']:.1f}** |" in table
    assert f"--max-resident {document['arguments']['max_resident']}" in table
    assert main(["plan", str(BUNDLED_MODEL), "--memory", "1KiB"]) == 1
    assert "error: memory='1KiB' is 1024 bytes" in capsys.readouterr().err
