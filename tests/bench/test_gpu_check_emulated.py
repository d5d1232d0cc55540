"""tools/gpu_check from its first step to its last, on the emulated device.

H2O_EMULATED_BUILD=build/release pytest tests/bench/test_gpu_check_emulated.py

Only what has nothing to do with it is replaced: the compiler, by a copy of that build, whose tests
are a few; compute-sanitizer and ncu, which need a GPU; and PyTorch, which is slow to import.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from h2o_bench.gpu_check.command import NOT_SUPPORTED, OK
from h2o_bench.gpu_check.steps import STEPS, Check, commands
from h2o_bench.gpu_sections import GRID, LARGE, LONG, MACHINE, PAPER, PREFILL, SCORES
from h2o_bench.records import Results
from support.needs import needs

ROOT = Path(__file__).resolve().parents[2]

pytestmark = needs("an emulated build (H2O_EMULATED_BUILD)", "H2O_EMULATED_BUILD" in os.environ)

# Configure, build and install: copies.
CMAKE = """
echo "$1" >>{calls}
case $1 in
  --build) mkdir -p "$2/tests/cpp" && cp {built}/tests/cpp/h2o_tests "$2/tests/cpp/" &&
    printf 'add_test(few h2o_tests --test-case=relu,gather*)\\n%s\\n' \\
      'set_tests_properties(few PROPERTIES LABELS cuda ENVIRONMENT H2O_TEST_DEVICE=cuda)' \\
      >"$2/tests/cpp/CTestTestfile.cmake" ;;
  --install) mkdir -p "$4/h2o_cpp" && cp {built}/python/bindings/_core*.so "$4/h2o_cpp/" ;;
esac
"""
# Lists the cases; the second tool is as on a virtual GPU.
SANITIZER = """
[ "$2" = memcheck ] || { echo "Error: Device not supported"; exit 1; }
shift 4
exec "$@" --list-test-cases
"""
PROFILER = "echo '==ERROR== ERR_NVGPUCTRPERM'; exit 1"

# A plugin that leaves two tests on the device.
FEW = """
def pytest_collection_modifyitems(items):
    few = ("test_auto_is_cuda[backend_of_generator]", "test_attention_equals_cpu[cuda--40-f16]")
    items[:] = [item for item in items if item.name in few]
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    built = Path(os.environ["H2O_EMULATED_BUILD"]).resolve()
    programs, modules = tmp_path / "bin", tmp_path / "modules"
    programs.mkdir()
    modules.mkdir()
    cmake = CMAKE.format(built=shlex.quote(str(built)), calls=shlex.quote(str(tmp_path / "calls")))
    for name, script in {"cmake": cmake, "compute-sanitizer": SANITIZER, "ncu": PROFILER}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    (modules / "pybind11.py").write_text("print('.')")
    (modules / "few.py").write_text(FEW)
    (modules / "torch.py").write_text("raise ImportError('not here')")
    paths = [str(modules), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTEST_ADDOPTS": "-p few",
        # Its checks are those of the C++ tests, and take most of the time.
        "H2O_CUDA_OVERLAP": "0",
    }


def test_whole_check(tmp_path: Path, environment: dict[str, str]) -> None:
    def check(name: str, *words: str) -> str:
        done = subprocess.run(
            [
                *(sys.executable, str(ROOT / "tools" / "gpu_check"), "--out", str(tmp_path / name)),
                *("--build", str(tmp_path / f"build of {name}"), "--quick", "--no-cublas"),
                *("--jobs", "1", *words),
            ],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    printed = check("first")
    rows = json.loads((tmp_path / "first" / "check.json").read_text())["results"]
    statuses = {(row["step"], row["name"]): row["status"] for row in rows}
    quick = Check(ROOT, tmp_path, tmp_path, quick=True, variables=environment)
    expected = [(step, command.name) for step in STEPS for command in commands(step, quick)]
    assert list(statuses) == [*expected[:3], ("build", "keep"), *expected[3:]]
    for (step, name), status in statuses.items():
        lacks = name.startswith(("profile", "racecheck"))
        assert status == (NOT_SUPPORTED if lacks else OK), (step, name)
        assert f"{step}: {name}" in printed
    counts = {row["name"]: row["counts"] for row in rows}
    assert counts["C++"] == {"passed": 2, "failed": 0}
    assert counts["Python"]["passed"] == 2
    assert "cuda (emulated" in printed
    assert printed.count("the same bits") == 3

    found = list(Results(tmp_path / "first" / "gpu.jsonl"))
    ours = {record.section for record in found if record.values}
    assert ours == {MACHINE, SCORES, PREFILL, GRID, LONG, PAPER, LARGE}
    assert {record.engine for record in found if record.measure == "absent"} == {
        *("torch", "transformers", "transformers, static cache, compiled", "Accelerate offload")
    }
    assert any("cuda (emulated" in record.note for record in found)
    assert "## Prefill" in (tmp_path / "first" / "gpu.md").read_text()

    # Another machine, with nothing but what the first call left: there is nothing to be done.
    calls = (tmp_path / "calls").read_text()
    assert calls.split() == ["-G", "--build", "--install"]
    shutil.rmtree(tmp_path / "build of first")
    assert f"{OK} " in check("second", "--from", str(tmp_path / "first"))
    assert (tmp_path / "calls").read_text() == calls
