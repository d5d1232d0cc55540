"""capacity(): the number of sequences that fit in memory, compared with allocated sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator, Policy, _core, capacity
from h2o_cpp.arguments import bytes_of
from h2o_cpp.cli import main

LINE = 64  # alignment of a layer's arrays in bytes
N_ARRAYS = 8  # arrays of a layer, at most


@pytest.mark.parametrize(
    ("memory", "n"),
    [
        ("4GiB", 4 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        (" 10 KiB ", 10_240),
        ("7kB", None),
        ("3B", 3),
        ("2TB", 2 * 10**12),
        (123, 123),
        ("123", 123),
        (" 4294967296 ", 2**32),
        ("1.5", None),
        ("9" * 400, None),
        ("9" * 400 + "GiB", None),
        (f"{2**63}", None),
        ("GiB", None),
        ("-1GiB", None),
        ("1,5GB", None),
        ("4 gigabytes", None),
        ("0.1B", None),
        ("0GiB", None),
        (0, None),
        (-5, None),
        (1.5, None),
        (None, None),
        (True, None),
    ],
)
def test_memory_sizes(memory: Any, n: int | None) -> None:
    if n is not None:
        assert bytes_of("memory", memory) == n
        return
    with pytest.raises(ValueError, match="memory="):
        bytes_of("memory", memory)


@pytest.mark.parametrize("model", ["opt_untied", "llama_gqa2_tied", "gptneox", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hh": 0.2},
        {"hh": 0.2, "n_ctx": 30, "kv_dtype": "f32"},
        {"hh": 10, "recent": 3, "kv_dtype": ("f32", "f16")},
        {"policy": Policy.h2o(100, 50, value_norm="l1")},
        {"hh": 10, "policy": "window"},
        {"policy": Policy.h2o(20, 30)},
        {"policy": [Policy.window(4), Policy.h2o(3, 3)]},
    ],
    ids=str,
)
@pytest.mark.parametrize("positions", ["auto", "original"])
def test_capacity_is_largest_number_that_fits(
    data: Path, model: str, options: dict[str, Any], positions: Any
) -> None:
    """The cache of `capacity` sequences fits in the memory; with one more it does not."""
    path = data / "golden" / f"{model}.gguf"
    n_layers = 3 if model == "opt_untied" else 2
    if isinstance(options.get("policy"), list):
        options = {"policy": [*options["policy"], Policy.window(5)][:n_layers]}
    options = {**options, "positions": positions}
    memory = 300_000
    n = capacity(path, memory, **options)
    assert n > 1
    with Generator(path, memory=memory, threads=1, **options) as generator:
        assert generator.max_sequences == n
        used = generator.stats().cache_bytes
    assert used <= memory
    # capacity counts each array of a sequence as if it were aligned separately.
    with Generator(path, max_sequences=n + 1, threads=1, **options) as generator:
        assert generator.stats().cache_bytes > memory - (n + 1) * n_layers * N_ARRAYS * LINE
    assert capacity(path, used // n - n_layers * N_ARRAYS * LINE, **options) == 0


def test_too_little_memory_and_invalid_options_are_rejected(tiny_opt: Path) -> None:
    assert capacity(tiny_opt, "1MiB") == 0
    with pytest.raises(
        ValueError, match="memory='1MiB' is too small for the cache of one sequence"
    ):
        Generator(tiny_opt, memory="1MiB")
    with pytest.raises(ValueError, match="give either max_sequences or memory, not both"):
        Generator(tiny_opt, memory="1GiB", max_sequences=2)
    with pytest.raises(ValueError, match="max_sequences=0"):
        Generator(tiny_opt, max_sequences=0)
    with pytest.raises(ValueError, match="policy is an empty list"):
        capacity(tiny_opt, "1GiB", policy=[])
    with pytest.raises(ValueError, match="n_ctx=4096"):
        capacity(tiny_opt, "1GiB", n_ctx=4096)


def test_max_sequences_is_limited_by_batch_rows(data: Path) -> None:
    path = data / "golden" / "opt_head_dim_one.gguf"
    with Generator(path, memory="1GiB", hh=2, n_batch=65000, threads=1) as generator:
        assert generator.max_sequences == 65536 - 65000 + 1
        assert generator.generate([[5, 6]], max_tokens=2, ignore_eos=True)[0].completion_tokens == 2


def test_missing_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        capacity(tmp_path / "none", "1GiB")


def test_info_command_shows_capacity(tiny_opt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tiny_opt), "--memory", "100MiB"]) == 0
    out = capsys.readouterr().out
    full, bounded = (capacity(tiny_opt, "100MiB", hh=hh) for hh in (None, 0.2))
    assert f"{full} of 2048 tokens in 100MiB, {bounded} with --hh 0.2" in out
    weights = sum(nbytes for *_, nbytes in _core.GgufFile(tiny_opt).tensors())
    command = ["info", str(tiny_opt), "--memory", "64MiB", "-c", "100", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)["sequences"]
    for sizes, n_bytes in ((found, 2**26), (found["beside_weights"], 2**26 - weights)):
        assert sizes["full"] == capacity(tiny_opt, n_bytes, n_ctx=100)
        assert sizes["hh_20"] == capacity(tiny_opt, n_bytes, n_ctx=100, hh=0.2)
    assert main(["info", str(tiny_opt), "--memory", "1MiB"]) == 0  # less than the weights
    assert "; beside the weights 0, 0 with --hh 0.2" in capsys.readouterr().out
    assert main(["info", str(tiny_opt), "--memory", "much"]) == 2
    assert "--memory 'much', expected bytes or a size such as 4GiB" in capsys.readouterr().err


def test_default_depends_on_available_memory(
    tiny_opt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 16 sequences, whose caches take up to half of the memory; at least one."""
    assert 0 < _core.available_memory() < 1 << 60
    one = cache_bytes_of_one(tiny_opt)
    for available, n in ((0, 1), (6 * one, 3), (1 << 50, 16)):
        monkeypatch.setattr(_core, "available_memory", lambda value=available: value)
        with Generator(tiny_opt, hh=20, threads=1) as generator:
            assert generator.max_sequences == n


def cache_bytes_of_one(model: Path) -> int:
    with Generator(model, hh=20, threads=1, max_sequences=1) as generator:
        return generator.stats().cache_bytes
