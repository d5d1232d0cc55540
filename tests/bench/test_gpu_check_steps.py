"""tools/gpu_check: the commands of each step, and the smoke test on the CPU."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from h2o_bench.gpu_check import smoke, steps
from h2o_bench.gpu_check.command import NOT_SUPPORTED, Result
from h2o_bench.gpu_check.steps import STEPS, Check, commands
from h2o_bench.gpu_plan import Plan

ROOT = Path(__file__).resolve().parents[2]


def test_commands_of_each_step(tmp_path: Path) -> None:
    check = Check(
        ROOT, tmp_path, tmp_path, llama_cpp=tmp_path / "llama", variables=dict(os.environ)
    )
    names = {step: [c.name for c in commands(step, check)] for step in STEPS if step != "build"}
    assert list(names) == ["smoke", "tests", "ours", "peers", "sanitize"]
    for step in names:
        assert all(command.seconds <= 600 for command in commands(step, check))
        assert len(names[step]) == len(set(names[step]))
    for command in commands("ours", check):
        # No other engine is opened.
        section = command.words[command.words.index("--sections") + 1]
        assert section in ("machine", "grid") or command.words[-2:] == ["--engines", "h2o.cpp"]
        # What is profiled does not count as a measurement, and the clocks stay as they are.
        is_profile = command.name.startswith("profile")
        assert (str(check.out / "gpu.jsonl") in command.words) == (not is_profile)
        if is_profile:
            clocks = command.words.index("--clock-control")
            assert command.words[clocks + 1] == "none"
            assert command.words[0] == "ncu"
    without = [command.name for command in commands("peers", replace(check, llama_cpp=None))]
    assert set(names["peers"]) - set(without) == {
        f"llama.cpp {shape} {type_name}" for shape, type_name in Plan().peers
    }
    refused = Result("sanitize", "memcheck", "exit 1")
    assert steps.judged(refused, "Error: Device not supported").status == NOT_SUPPORTED
    profile = next(name for name in names["ours"] if name.startswith("profile"))
    missing, forbidden = (Result("ours", profile, s) for s in ("cannot start", "exit 1"))
    assert steps.judged(missing, "").status == NOT_SUPPORTED
    assert steps.judged(forbidden, "==ERROR== ERR_NVGPUCTRPERM").status == NOT_SUPPORTED
    assert steps.judged(Result("ours", profile, "exit 1"), "").status == "exit 1"
    failed = Result("tests", "C++", "exit 1")
    assert steps.judged(failed, "Device not supported").status == "exit 1"


def test_few_files_are_left_for_the_next_call(tmp_path: Path) -> None:
    """All steps together write at most eight files, as many as a lent machine may return."""
    check = Check(ROOT, tmp_path / "out", tmp_path / "build", variables=dict(os.environ))
    names = {"h2o_tests", "CTestTestfile.cmake", "_core.so", "check.json", "check.log"}
    for step in STEPS[1:]:
        for command in commands(step, check):
            written = (Path(word) for word in command.words if word.startswith(str(check.out)))
            names |= {path.name for path in written if path.parent == check.out}
    assert {"gpu.jsonl", "gpu.md"} < names
    assert len(names) <= 8


def test_sanitized_cases_exist() -> None:
    files = (ROOT / "tests" / "cpp").glob("test_*.cpp")
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    cases = re.findall(r'TEST_CASE\(\s*"([^"]*)"', text)
    for patterns in steps.SANITIZED.values():
        for pattern in patterns:
            assert fnmatch.filter(cases, pattern), pattern
            assert "," not in pattern  # doctest would take it for two


def test_pytest_accepts_the_options(tmp_path: Path) -> None:
    """With only the named plugins and this project's own options."""
    check = Check(ROOT, tmp_path, tmp_path, device="cpu")
    (command,) = (c for c in commands("tests", check) if c.name == "Python")
    words = [*command.words[:-5], "--collect-only", command.words[-4]]
    environment = {**os.environ, **command.variables}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: all are deselected


def test_cublas_is_found(tmp_path: Path) -> None:
    library = tmp_path / "b" / "nvidia" / "cu13" / "lib" / "libcublas.so.13"
    assert not steps.find_cublas([str(tmp_path / "a"), str(tmp_path / "b")])
    library.parent.mkdir(parents=True)
    library.touch()
    assert steps.find_cublas([str(tmp_path / "a"), str(tmp_path / "b")]) == [library.parent]


def test_models_directory_is_emptied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    left = tmp_path / "h2o_gpu_check" / "left.gguf"
    left.parent.mkdir()
    left.touch()
    free = {Path("/dev/shm"): 5, tmp_path: 7}
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=free[place]))
    assert steps.models_directory(8) == left.parent  # neither has room, so the larger one
    assert not left.exists()  # left by a killed run


def test_smoke_reports_identical_bits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(ROOT / "tests" / "data" / "golden" / "llama_gqa2_tied.gguf")
    monkeypatch.setattr(sys, "argv", ["smoke", "cpu", model])
    assert smoke.main() == 0
    output = capsys.readouterr().out
    assert output.count("the same bits") == 3
    assert "0.00e+00 from the CPU" in output


def test_smoke_reports_different_bits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(device: str, n_steps: int, models: object, variables: dict[str, str]) -> object:
        logits = np.ones((4, 2, 5), np.float32)
        if "H2O_CUDA_GRAPHS" not in variables and device != "cpu":
            logits[2:, 0, 0] = np.nextafter(np.float32(1), np.float32(2))
        if "H2O_CUDA_OVERLAP" not in variables and device != "cpu":
            raise RuntimeError("exit 1: [cuda] launch: no")
        return "cuda (x, no cuBLAS)", {"tiny, full": logits}

    monkeypatch.setattr(smoke, "_decode", decode)
    monkeypatch.setattr(sys, "argv", ["smoke", "cuda", "--no-cublas", "tiny"])
    assert smoke.main() == 1
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "without either: cuda (x, no cuBLAS)"
    assert output[1] == "without overlap: cuda (x, no cuBLAS): OTHER BITS"
    assert output[2] == "  tiny, full: steps 2 to 3, 2 of 4"
    assert output[3] == "without graphs: exit 1: [cuda] launch: no"
    monkeypatch.setattr(sys, "argv", ["smoke", "cuda", "tiny"])
    assert smoke.main() == 1
    assert "there is no cuBLAS" in capsys.readouterr().out
