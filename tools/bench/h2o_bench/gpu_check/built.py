"""What a build leaves for later calls, which may find nothing else of it: stripped binaries."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

MOST_BYTES = 16 << 20  # of a file that is kept


def test_program(build: Path) -> Path:
    """The C++ tests, where CMake builds them."""
    return build / "tests" / "cpp" / "h2o_tests"


def kept_files(build: Path, package: Path) -> list[Path]:
    """Where a build has what later steps need. Raises FileNotFoundError if it lacks some of it."""
    files = [test_program(build), build / "tests" / "cpp" / "CTestTestfile.cmake"]
    files += (package / "h2o_cpp").glob("_core*.so")
    if missing := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{build} has no {missing[0]}")
    if len(files) < 3:
        raise FileNotFoundError(f"{package} has no _core")
    return files


def keep(build: Path, package: Path, out: Path) -> None:
    """Copy them, stripped. Raises FileNotFoundError, OSError, ValueError if one is too large."""
    for file in kept_files(build, package):
        to = out / file.name
        try:
            shutil.copy2(file, to)
            if file.suffix != ".cmake":
                subprocess.run(["strip", str(to)], check=True)
            if to.stat().st_size > MOST_BYTES:
                raise ValueError(f"{file.name} is {to.stat().st_size} bytes, at most {MOST_BYTES}")
        except BaseException:
            to.unlink(missing_ok=True)  # half a program is worse than none
            raise


def restore(out: Path, build: Path, package: Path) -> None:
    """Put what keep() left where the build had it. Raises FileNotFoundError."""
    cores = list(out.glob("_core*.so"))
    places = {
        out / "h2o_tests": test_program(build),
        out / "CTestTestfile.cmake": build / "tests" / "cpp" / "CTestTestfile.cmake",
        **{core: package / "h2o_cpp" / core.name for core in cores},
    }
    if len(places) < 3 or not all(file.is_file() for file in places):
        raise FileNotFoundError(f"nothing is built here or kept in {out.name}: begin with a build")
    for file, to in places.items():
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, to)
        if file.suffix != ".cmake":
            to.chmod(0o755)
