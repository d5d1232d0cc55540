"""tools/gpu_check without a GPU: time limits, kills, a full disk, and kept files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from h2o_bench.gpu_check import built
from h2o_bench.gpu_check.command import OK, Command, Log, Result, counts_of, run
from h2o_bench.gpu_check.journal import Journal, sources_digest, table

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, seconds: float = 60) -> Command:
    return Command("some", [sys.executable, "-c", code], seconds)


def run_python(code: str, log: Path, limit: float = 60) -> tuple[Result, str]:
    return run("tests", python(code), Log(log), limit, {}, ROOT)


def fifo(directory: Path) -> Path:
    os.mkfifo(directory / "fifo")
    return directory / "fifo"


def test_command_result_and_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    result, output = run_python("print('said'); raise SystemExit(3)", log)
    assert (result.step, result.name, result.status) == ("tests", "some", "exit 3")
    assert output == "said\n"
    assert log.read_text().splitlines()[-1] == "said"
    assert run_python("", log)[0].passed
    assert log.read_text().count("$ ") == 2  # appended


def test_missing_program_cannot_start(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    result, _ = run("build", Command("none", ["/no/such/program"], 1), log, 1, {}, ROOT)
    assert result.status == "cannot start"
    assert not result.passed


def test_time_limit_kills_process_group(tmp_path: Path) -> None:
    """Including background children."""
    pipe = fifo(tmp_path)
    script = f"sleep 600 3>{pipe} & exec sleep 600 3>{pipe}"
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    command = Command("some", ["sh", "-c", script], 9)
    result, _ = run("tests", command, Log(tmp_path / "log"), 1, {}, ROOT)
    assert result.status == "stopped at 1 s"
    os.set_blocking(reading, True)
    assert os.read(reading, 1) == b""  # every writer is gone
    os.close(reading)


def test_no_time_left(tmp_path: Path) -> None:
    result, _ = run_python("raise SystemExit", tmp_path / "log", limit=-1)
    assert result.status == "no time"
    assert not (tmp_path / "log").exists()


def test_full_disk_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Results are printed even if they cannot be written."""
    log = Log(Path("/dev/full"))
    result, output = run("tests", python("print('said')"), log, 60, {}, ROOT)
    assert result.passed
    assert output == "said\n"
    assert capsys.readouterr().out == "the log is not complete: full: No space left on device\n"

    (tmp_path / "check.new").symlink_to("/dev/full")
    journal = Journal(tmp_path / "check.json", "sources")
    journal.add(result)
    assert "No space left" in capsys.readouterr().out
    assert journal.passed("tests", "some")


def test_journal_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    first = Journal(path, "sources")
    first.add(Result("tests", "C++", "begun"))
    first.add(Result("build", "compile", OK, 7.0))
    assert not Journal(path, "sources").passed("tests", "C++")  # killed before it finished
    first.add(Result("tests", "C++", OK, 3.0, {"passed": 5}))
    then = Journal(path, "sources")
    assert then.passed("tests", "C++")
    assert [r.name for r in then.results] == ["C++", "compile"]
    assert [r.name for r in then.of(["build"])] == ["compile"]
    assert "tests: C++" in table(then.results)
    assert not Journal(path, "other sources").results
    path.write_text(path.read_text()[:20])
    assert not Journal(path, "sources").results


def test_digest_covers_compiled_sources_only(tmp_path: Path) -> None:
    for name in ("cuda", "cpp", "python/bindings", "tests/cpp", "tests/cuda_emulation", "docs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "CMakeLists.txt").write_text("")
    source = tmp_path / "cuda" / "a.cu"
    source.write_text("1")
    digest = sources_digest(tmp_path)
    (tmp_path / "docs" / "b.md").write_text("1")
    assert sources_digest(tmp_path) == digest
    source.write_text("2")
    assert sources_digest(tmp_path) != digest


def fake_build(tmp_path: Path) -> tuple[Path, Path]:
    build, package = tmp_path / "build", tmp_path / "build" / "package"
    built.test_program(build).parent.mkdir(parents=True)
    (package / "h2o_cpp").mkdir(parents=True)
    shutil.copy(os.path.realpath(sys.executable), built.test_program(build))
    shutil.copy(os.path.realpath(sys.executable), package / "h2o_cpp" / "_core.x.so")
    (built.test_program(build).parent / "CTestTestfile.cmake").write_text("add_test()")
    built.mark(build, sources_digest(ROOT))
    return build, package


def test_binaries_are_kept_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, package = fake_build(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    built.keep(build, package, out)
    shutil.rmtree(build)
    with pytest.raises(FileNotFoundError, match="has no h2o_tests"):
        built.kept_files(build, package)
    built.restore(out, build, package)
    assert len(built.kept_files(build, package)) == 3
    assert os.access(built.test_program(build), os.X_OK)
    done = subprocess.run([built.test_program(build), "-c", "print(7)"], capture_output=True)
    assert done.stdout == b"7\n"

    monkeypatch.setattr(built, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="at most 100"):
        built.keep(build, package, out)
    with pytest.raises(FileNotFoundError, match="run a build first"):
        built.restore(out, build, package)  # no partial copy is left


def test_counts() -> None:
    assert counts_of("4 passed, 2 skipped, 1 error in 0.5s") == {
        "passed": 4,
        "skipped": 2,
        "failed": 1,
    }
    line = "test cases: 3 | 2 passed | 1 failed | 0 skipped\n"
    assert counts_of(line * 2) == {"passed": 4, "failed": 2}


def gpu_check(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gpu_check"), *words],
        capture_output=True,
        text=True,
        env=env,
    )


def with_fake_tools(tmp_path: Path, **scripts: str) -> dict[str, str]:
    """An environment with these programs first in PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def test_no_package_is_needed() -> None:
    """Those of this project are not built yet."""
    words = [sys.executable, "-I", "-S", str(ROOT / "tools" / "gpu_check"), "--help"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_missing_build_is_reported(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path / "out"), "--build", str(tmp_path / "build")]
    done = gpu_check(*words, "--only", "tests")
    assert done.returncode == 1
    assert done.stdout == "nothing is built or kept in out, run a build first\n"
    assert gpu_check(*words, "--only", "test").returncode == 2


def test_next_call_resumes(tmp_path: Path) -> None:
    """Passed commands are not run again; failed ones are, with the kept binaries."""
    fake_build(tmp_path)
    calls = tmp_path / "calls"
    env = with_fake_tools(
        tmp_path, cmake=f'echo "$1" >>{calls}', ctest=f"echo ctest >>{calls}; exit 8"
    )
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "pybind11.py").write_text("print('.')")  # not needed by the tests
    env["PYTHONPATH"] = os.pathsep.join(
        [str(tmp_path / "modules"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    words = ["--build", str(tmp_path / "build"), "--jobs", "1"]
    first, second = tmp_path / "first", tmp_path / "second"
    done = gpu_check("--out", str(first), *words, "--only", "build", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert calls.read_text().split() == ["-G", "--build", "--install"]
    assert {file.name for file in first.iterdir()} == {
        *("h2o_tests", "CTestTestfile.cmake", "_core.x.so", "check.json", "check.log")
    }

    shutil.rmtree(tmp_path / "build")  # as on another machine
    again = [*words, "--from", str(first), "--only", "build,tests", "--limit", "30"]
    done = gpu_check("--out", str(second), *again, env=env)
    assert done.returncode == 1
    assert calls.read_text().split()[3:] == ["ctest"]
    found = json.loads((second / "check.json").read_text())["results"]
    rows = {row["name"]: row["status"] for row in found}
    assert rows["compile"] == OK
    assert rows["C++"] == "exit 8"
    assert rows["Python"] != OK  # that file is not a real _core


def test_binaries_of_other_sources_are_not_used(tmp_path: Path) -> None:
    """Neither those of a build directory nor kept ones."""
    build, package = fake_build(tmp_path)
    words = ["--build", str(build), "--only", "tests", "--limit", "0"]
    done = gpu_check("--out", str(tmp_path / "out"), *words)
    assert "tests: C++: no time" in done.stdout
    built.mark(build, "other sources")
    done = gpu_check("--out", str(tmp_path / "out"), *words)
    assert done.stdout == "nothing is built or kept in out, run a build first\n"

    built.keep(build, package, tmp_path / "out")
    for kept, expected in [
        (sources_digest(ROOT), "tests: C++: no time"),
        ("other sources", "what is kept in out is of other sources, run a build first\n"),
    ]:
        built.mark(build, "other sources")
        journal = Journal(tmp_path / "out" / "check.json", sources_digest(ROOT))
        journal.kept = kept
        journal.add(Result("build", "keep", OK))
        assert expected in gpu_check("--out", str(tmp_path / "out"), *words).stdout


def test_kill_ends_command_and_keeps_its_row(tmp_path: Path) -> None:
    """The running command ends too, and its row has the status "begun"."""
    fake_build(tmp_path)
    pipe = fifo(tmp_path)
    env = with_fake_tools(tmp_path, ctest=f"exec 3>{pipe}; echo begun >&3; exec sleep 600")
    out = tmp_path / "out"
    words = ["--out", str(out), "--only", "tests", "--build", str(tmp_path / "build")]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "gpu_check"), *words],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    with pipe.open() as held:
        assert held.readline() == "begun\n"
        process.terminate()
        output, _ = process.communicate()
        assert held.read() == ""  # every writer is gone
    assert process.returncode == 143
    assert "begun" in output  # the table
    rows = json.loads((out / "check.json").read_text())["results"]
    assert [(row["name"], row["status"]) for row in rows] == [("C++", "begun")]
