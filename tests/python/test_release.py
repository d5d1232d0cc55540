"""tools/release, as far as it can be tested without building: the compiler, and which Pythons."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from support.needs import LINUX

pytestmark = LINUX

TOOL = Path(__file__).resolve().parents[2] / "tools" / "release"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = spec_from_loader("release", SourceFileLoader("release", str(TOOL)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode  # not beside the tool
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_compiler_takes_the_options_of_gcc(release: ModuleType, tmp_path: Path) -> None:
    python = script(tmp_path / "python", 'printf "%s\\n" "$@"')
    compiler = tmp_path / "zig-c++"
    compiler.write_text(release.COMPILER.format(python=python, target="x86_64-linux-gnu.2.28"))
    compiler.chmod(0o755)
    given = ["-march=x86-64-v4", "-mavx512vnni", "-c", "a b.cpp", "-o", "a.o"]
    out = subprocess.run([compiler, *given], capture_output=True, text=True, check=True).stdout
    target = ["-m", "ziglang", "c++", "-target", "x86_64-linux-gnu.2.28"]
    assert out.splitlines() == [*target, "-march=x86_64_v4", *given[1:]]


def test_pythons_that_can_be_built_for(release: ModuleType, tmp_path: Path) -> None:
    usable = release.usable
    assert usable(str(script(tmp_path / "good", "echo /the/python"))) == "/the/python"
    assert usable(str(script(tmp_path / "bad", "exit 1"))) is None  # too old, or without headers
    assert usable(str(tmp_path / "none")) is None
