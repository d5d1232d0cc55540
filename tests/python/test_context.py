"""n_ctx: its default, the memory it takes, and messages about it."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from h2o_cpp import Generator, _core
from h2o_cpp.cli import main
from support.needs import LINUX, PLAIN_MEMORY

KEY = b"llama.context_length"


def trained_for(llama: Path, path: Path, n_ctx: int) -> Path:
    """A copy of the golden model with another context_length."""
    data = bytearray(llama.read_bytes())
    at = data.index(KEY) + len(KEY) + 4  # after the type
    data[at : at + 4] = struct.pack("<I", n_ctx)
    path.write_bytes(data)
    return path


@pytest.fixture
def long_model(llama: Path, tmp_path: Path) -> Path:
    """A model trained for 131072 tokens."""
    return trained_for(llama, tmp_path / "long.gguf", 131072)


def test_default_n_ctx_is_limited(long_model: Path, llama: Path) -> None:
    assert _core.DEFAULT_N_CTX == 4096
    for n_ctx, expected in ((None, 4096), (0, 131072), (9999, 9999)):
        with Generator(long_model, threads=1, hh=0.5, n_ctx=n_ctx) as generator:
            assert (generator.n_ctx, generator.n_ctx_train) == (expected, 131072)
            assert generator.policy.budget == expected // 2  # type: ignore[union-attr]
    with Generator(llama, threads=1) as generator:
        assert generator.n_ctx == 40


def test_run_notes_limited_default_n_ctx(
    long_model: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, arguments, noted in (
        (long_model, [], True),
        (long_model, ["-c", "0"], False),
        (long_model, ["-c", "100"], False),
        (llama, [], False),
    ):
        assert main(["run", "a", "-m", str(model), "-n", "1", *arguments]) == 0
        note = (
            "note: the context is 4096 of the 131072 tokens that the model was trained for; "
            "-c N sets it, -c 0 uses all\n"
        )
        assert (note in capsys.readouterr().err) == noted


MEMORY = """
import sys
from h2o_cpp import Generator
from h2o_cpp.measure.machine import rss_bytes

def open_model(n_ctx):
    return Generator(sys.argv[1], n_ctx=n_ctx, threads=1, kv_dtype="f32", max_sequences=1)

open_model(40).generate([5] * 30, max_tokens=1)  # loads whatever is loaded on first use
before = rss_bytes()
generator = open_model(0)
cache = generator.stats().cache_bytes
assert cache > 16 * 2**20, cache
opened = rss_bytes() - before
assert opened < cache / 8, (opened, cache)
generator.generate([5] * 2000, max_tokens=1)
used = rss_bytes() - before
assert used < cache / 4, (used, cache)
"""


@LINUX  # reads resident memory from /proc
@PLAIN_MEMORY
def test_cache_memory_is_committed_on_first_use(long_model: Path) -> None:
    subprocess.run([sys.executable, "-c", MEMORY, long_model], check=True)


@PLAIN_MEMORY
def test_too_large_cache_error_names_options(llama: Path, tmp_path: Path) -> None:
    model = trained_for(llama, tmp_path / "huge.gguf", 2**24)
    with pytest.raises(MemoryError) as error:
        Generator(model, n_ctx=0, threads=1, max_sequences=4096, n_batch=1)
    assert str(error.value).startswith("the cache of 4096 x n_ctx 16777216 tokens cannot be")
    assert str(error.value).endswith("a smaller n_ctx or a budget hh takes less")
