"""Stripped binaries kept for later calls, which may find nothing else of a build."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

MOST_BYTES = 16 << 20  # largest file to keep
_SOURCES = "built_sources"  # in a build directory: the digest of what it was built from


def test_program(build: Path) -> Path:
    """The path of the C++ tests."""
    return build / "tests" / "cpp" / "h2o_tests"


def mark(build: Path, sources: str) -> None:
    """Record what a finished build was built from."""
    (build / _SOURCES).write_text(sources, encoding="utf-8")


def kept_files(build: Path, package: Path) -> list[Path]:
    """Paths of a build that later steps need. Raises FileNotFoundError if any is missing."""
    files = [test_program(build), build / "tests" / "cpp" / "CTestTestfile.cmake"]
    files += (package / "h2o_cpp").glob("_core*.so")
    if missing := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{build} has no {missing[0]}")
    if len(files) < 3:
        raise FileNotFoundError(f"{package} has no _core")
    return files


def is_of(build: Path, package: Path, sources: str) -> bool:
    """Whether a build has what later steps need, and is of these sources."""
    try:
        kept_files(build, package)
        return (build / _SOURCES).read_text(encoding="utf-8") == sources
    except FileNotFoundError:
        return False


def keep(build: Path, package: Path, out: Path) -> None:
    """Copy them, stripped. Raises FileNotFoundError, OSError, and ValueError for a large file."""
    for file in kept_files(build, package):
        to = out / file.name
        try:
            shutil.copy2(file, to)
            if file.suffix != ".cmake":
                subprocess.run(["strip", str(to)], check=True)
            if to.stat().st_size > MOST_BYTES:
                raise ValueError(f"{file.name} is {to.stat().st_size} bytes, at most {MOST_BYTES}")
        except BaseException:
            to.unlink(missing_ok=True)  # do not leave half a program
            raise


def restore(out: Path, build: Path, package: Path) -> None:
    """Restore kept files to the build directory. Raises FileNotFoundError."""
    cores = list(out.glob("_core*.so"))
    places = {
        out / "h2o_tests": test_program(build),
        out / "CTestTestfile.cmake": build / "tests" / "cpp" / "CTestTestfile.cmake",
        **{core: package / "h2o_cpp" / core.name for core in cores},
    }
    if len(places) < 3 or not all(file.is_file() for file in places):
        raise FileNotFoundError(f"nothing is built or kept in {out.name}, run a build first")
    for file, to in places.items():
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, to)
        if file.suffix != ".cmake":
            to.chmod(0o755)
