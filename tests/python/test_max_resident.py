"""Weight streaming: models with only part of the weights resident in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import BUNDLED_MODEL, Generator, Policy
from h2o_cpp.cli import main
from h2o_cpp.model.session import open_model, open_session
from support.needs import LINUX
from support.shapes import config
from support.synthetic import write_model

PROMPT = "The old man went down to the sea"
OPTIONS: dict[str, Any] = {"hh": 40, "device": "cpu", "threads": 1, "seed": 3}
MIB = 2**20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers of 6.5 MiB each."""
    path = tmp_path_factory.mktemp("models") / "large.gguf"
    small = config(
        "TinyLlama-1.1B",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=512,
        max_position_embeddings=512,
    )
    write_model(path, small, "F16")
    return path


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of 24 experts of 0.75 MiB each, 2 for each token."""
    return write_mixture(tmp_path_factory.mktemp("models") / "mixture.gguf", 24, 256)


def write_mixture(path: Path, n_experts: int, width: int) -> Path:
    """Write a model of four layers with experts of this width."""
    small = config(
        "Qwen3-30B-A3B",
        hidden_size=512,
        head_dim=64,
        moe_intermediate_size=width,
        num_experts=n_experts,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=512,
    )
    write_model(path, small, "F16")
    return path


def minimum_resident(path: Path, device: str = "cpu") -> int:
    """The minimum max_resident in bytes, taken from the error message."""
    with pytest.raises(ValueError, match=r"max_resident is 1 bytes; .* take \d+") as error:
        open_model(path, device=device, threads=1, max_resident=1)
    return int(str(error.value).split()[-1])


def test_fewer_layers_are_streamed_as_max_resident_grows() -> None:
    model_bytes = BUNDLED_MODEL.stat().st_size
    needed = minimum_resident(BUNDLED_MODEL)
    streamed = []
    for size in (needed, (needed + model_bytes) // 2, model_bytes):
        model = open_model(BUNDLED_MODEL, device="cpu", threads=1, max_resident=size)
        assert model.streamed_bytes <= max(0, model_bytes - size) + 2 * (model_bytes - needed) // 4
        streamed.append(model.n_streamed_layers)
    assert streamed == sorted(streamed, reverse=True)
    assert streamed[0] == 6
    assert streamed[-1] == 0
    assert open_model(BUNDLED_MODEL, device="cpu", threads=1).n_streamed_layers == 0


def test_max_resident_does_not_change_outputs() -> None:
    with Generator(BUNDLED_MODEL, **OPTIONS) as generator:
        expected = [generator.generate(PROMPT, max_tokens=n).text for n in (30, 60)]
    for more in (0, 700_000):
        size = minimum_resident(BUNDLED_MODEL) + more
        with Generator(BUNDLED_MODEL, max_resident=size, **OPTIONS) as generator:
            assert [generator.generate(PROMPT, max_tokens=n).text for n in (30, 60)] == expected


def test_max_resident_does_not_change_logits(device: str) -> None:
    """Bit-identical, after a prompt and after each following token."""
    size = minimum_resident(BUNDLED_MODEL, device)
    tokens = [5 + 7 * i % 90 for i in range(40)]
    found = []
    for resident in (None, size, size + 700_000):
        model = open_model(BUNDLED_MODEL, device=device, threads=1, max_resident=resident)
        assert (model.n_streamed_layers > 0) == (resident is not None)
        assert (model.streamed_bytes > 0) == (resident is not None)
        session = open_session(model, Policy.h2o(6, 6), n_ctx=64, n_batch=30, n_sequences=2)
        rows = []
        for sequence, part in ((0, tokens[:30]), (1, tokens[10:30]), *((0, [t]) for t in tokens)):
            if session.room(sequence) >= len(part):
                rows.append(session.step([(sequence, np.asarray(part, np.int32))]).copy())
        assert len(rows) > 30
        found.append(np.concatenate(rows))
    for logits in found[1:]:
        np.testing.assert_array_equal(logits, found[0])


def test_sequences_share_streamed_weights(device: str) -> None:
    options: dict[str, Any] = {**OPTIONS, "device": device, "max_sequences": 3}
    with Generator(BUNDLED_MODEL, **options) as generator:
        expected = [
            result.text for result in generator.generate([PROMPT, "A", "The"], max_tokens=20)
        ]
    size = minimum_resident(BUNDLED_MODEL, device)
    with Generator(BUNDLED_MODEL, max_resident=size, **options) as generator:
        texts = [result.text for result in generator.generate([PROMPT, "A", "The"], max_tokens=20)]
    assert texts == expected


MEASURE = """
import sys
from h2o_cpp import Generator

def resident():
    kinds = "RssFile", "RssShmem"  # the second if /tmp is in memory
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(kinds))

before = resident()
size = int(sys.argv[2]) or None
most = 0
with Generator(sys.argv[1], device="cpu", max_resident=size, threads=1) as generator:
    for _ in generator.stream("ab", max_tokens=20, ignore_eos=True):
        most = max(most, resident())
print(most - before)
"""


@LINUX  # reads /proc
@pytest.mark.parametrize(
    ("model", "more", "ends"),
    [("large", 0, 8 * 9 * 2 * 16), ("mixture", 4 * MIB, 4 * (9 * 2 * 16 + 3 * 24 * 2))],
)
def test_max_resident_bounds_memory(
    request: pytest.FixtureRequest, model: str, more: int, ends: int
) -> None:
    """At most max_resident of the file is in memory, plus the pages at the ends of matrices."""
    path: Path = request.getfixturevalue(model)

    def most(size: int) -> int:
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(path), str(size)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return int(done.stdout)

    size = minimum_resident(path) + more
    assert size < path.stat().st_size - 30 * MIB
    # Library pages that are first touched during generation count in both measurements.
    assert most(0) - most(size) > path.stat().st_size - size - ends * 4096


@pytest.mark.parametrize("layers", [False, True])
def test_streamed_experts_do_not_change_logits(mixture: Path, tmp_path: Path, layers: bool) -> None:
    """Logits are bit-identical while experts are loaded and evicted individually.

    With `layers`, two whole layers take less memory than all weights that are not experts.
    """
    path = write_mixture(tmp_path / "model.gguf", 4, 64) if layers else mixture
    model_bytes, size = path.stat().st_size, minimum_resident(path)
    tokens = np.arange(5, 500, 7, dtype=np.int32)
    expected: list[Any] = []
    read = []
    for resident in (None, size, (size + model_bytes) // 2, model_bytes):
        model = open_model(path, device="cpu", threads=1, max_resident=resident)
        session = open_session(model, Policy.h2o(6, 6), n_ctx=128, n_batch=30)
        rows = [session.step([(0, tokens[:30])]).copy()]
        before = model.experts_read
        rows += [session.step([(0, tokens[i : i + 1])]).copy() for i in range(30, len(tokens))]
        expected = expected or rows
        np.testing.assert_array_equal(rows, expected)
        if resident == size and layers:
            assert (model.n_streamed_layers, model.experts_needed) == (4, 0)
        elif resident is not None:
            read.append(model.experts_read - before)
            assert model.n_streamed_layers == 0
            assert (model.experts_needed > 0) == (resident != model_bytes)
    assert read == sorted(read, reverse=True)
    assert read[-1] == 0
    assert layers or read[0] == 4 * 2 * (len(tokens) - 30)


def test_invalid_max_resident(capsys: pytest.CaptureFixture[str]) -> None:
    for invalid in ("much", "0GiB", 0, -1):
        with pytest.raises(ValueError, match="max_resident="):
            Generator(BUNDLED_MODEL, max_resident=invalid)
    assert main(["run", "a", "--max-resident", "1KiB"]) == 2
    assert "two layers" in capsys.readouterr().err
