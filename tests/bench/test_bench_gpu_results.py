"""The results of tools/bench/gpu: what is measured again, and a full disk."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from h2o_bench.records import Record, Results, ResultsError

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """Writes beyond this size of a file fail, as on a full disk; also of programs started here."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_our_engine_must_be_measured(tmp_path: Path) -> None:
    """A command that could not open it fails, and runs again in the next call."""
    results = tmp_path / "gpu.jsonl"
    words = [sys.executable, str(ROOT / "tools" / "bench" / "gpu"), "--results", str(results)]
    words += ["--page", str(tmp_path / "gpu.md"), "--models", str(tmp_path), "--quick"]
    words += ["--sections", "grid", "--shapes", "SmolLM2-135M"]
    for device in ("cuda:99", "cpu"):
        done = subprocess.run([*words, "--device", device], capture_output=True, text=True)
        assert done.returncode == (device != "cpu"), done.stderr
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["measure"] for row in found].count("absent") == 1
    assert any(row["note"].startswith("ValueError: ") and "cuda" in row["note"] for row in found)
    assert any(row["measure"] == "step seconds" for row in found)


def test_repeated_command_replaces_its_records(tmp_path: Path) -> None:
    results = Results(tmp_path / "gpu.jsonl")
    for command in ("a", "b", "a"):
        results.forget_command(command)
        for section in (11, 12):
            results.add(Record(section, "", "", "command", note=command))
            results.add(Record(section, command, "h2o.cpp", "decode", (float(section),)))
    rest = [(record.model, record.section) for record in results if record.measure == "decode"]
    assert rest == [("b", 11), ("b", 12), ("a", 11), ("a", 12)]


def test_full_disk_keeps_results(tmp_path: Path) -> None:
    """A write that fails halfway, of a new record and of a file without an old one."""
    path = tmp_path / "gpu.jsonl"
    results = Results(path)
    records = [Record(11, "a", "h2o.cpp", "command", note="a"), Record(11, "a", "b", "c", (1.0,))]
    for record in records:
        results.add(record)
    size = path.stat().st_size
    with file_size_limit(size + 20), pytest.raises(ResultsError, match=r"^gpu.jsonl: File too lar"):
        results.add(records[0])
    assert path.stat().st_size == size
    with file_size_limit(20), pytest.raises(ResultsError, match=r"^gpu.jsonl: File too large$"):
        results.forget([12])
    assert list(results) == records
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("space", [-1, 20])
def test_full_disk_ends_measurement(tmp_path: Path, space: int) -> None:
    """With one sentence; what was measured before stays. space: bytes for new records."""
    results = tmp_path / "gpu.jsonl"
    before = Record(11, "shape", "h2o.cpp", "decode 16", (1.0,))
    Results(results).add(before)
    words = [sys.executable, str(ROOT / "tools" / "bench" / "gpu"), "--results", str(results)]
    words += ["--models", str(tmp_path), "--sections", "grid", "--shapes", ""]
    with file_size_limit(results.stat().st_size + space):
        done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "the results are not complete: gpu.jsonl: File too large\n"
    assert list(Results(results)) == [before]
