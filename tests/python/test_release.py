"""The parts of tools/release that need no build."""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from importlib.machinery import EXTENSION_SUFFIXES, SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

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
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode  # no .pyc beside the tool
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("gcc_option", "zig_option"),
    [
        ("-march=x86-64-v4", "-march=x86_64_v4"),
        ("-march=armv8.2-a+dotprod", "-mcpu=generic+v8_2a+dotprod"),
    ],
)
def test_compiler_wrapper_translates_gcc_options(
    release: ModuleType, tmp_path: Path, gcc_option: str, zig_option: str
) -> None:
    zig = script(tmp_path / "zig", 'printf "%s\\n" "$@"')
    given = ["-mavx512vnni", "-c", "a b.cpp", "-o", "a.o"]
    out = subprocess.run(
        [release.ZIG / "c++", gcc_option, *given],
        env={**os.environ, "H2O_ZIG": str(zig)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert out.splitlines() == ["c++", zig_option, *given]


def test_usable_pythons(release: ModuleType, tmp_path: Path) -> None:
    usable = release.usable
    assert usable(str(script(tmp_path / "good", "echo /the/python"))) == "/the/python"
    assert usable(str(script(tmp_path / "bad", "exit 1"))) is None  # too old or no headers
    assert usable(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("version", "target", "suffix"),
    [
        ((3, 12), "linux-x86_64", ".cpython-312-x86_64-linux-gnu.so"),
        ((3, 12), "linux-aarch64", ".cpython-312-aarch64-linux-gnu.so"),
        ((3, 11), "linux-musl-x86_64", ".cpython-311-x86_64-linux-musl.so"),
        ((3, 10), "linux-musl-x86_64", ".cpython-310-x86_64-linux-gnu.so"),  # as in CPython 3.10
    ],
)
def test_extension_module_suffix(
    release: ModuleType, version: tuple[int, int], target: str, suffix: str
) -> None:
    assert release.module_suffix(version, target) == suffix


def test_extension_module_suffix_of_this_python(release: ModuleType) -> None:
    version, suffix = release.version_and_suffix(sys.executable)
    assert version == sys.version_info[:2]
    assert suffix == EXTENSION_SUFFIXES[0]


def wheel(path: Path, tags: str, *names: str) -> Path:
    path = path / f"h2o_cpp-0.2.0-cp311-cp311-{tags}.whl"
    with ZipFile(path, "w") as files:
        for name in names:
            files.writestr(name, "")
    return path


@pytest.mark.parametrize(
    "tags",
    [
        "manylinux_2_27_x86_64.manylinux_2_28_x86_64",
        "manylinux_2_28_aarch64",
        "musllinux_1_2_x86_64",
    ],
)
def test_allowed_wheel_tags(release: ModuleType, tmp_path: Path, tags: str) -> None:
    release.check_audited(wheel(tmp_path, tags, "h2o_cpp/_core.so"))


@pytest.mark.parametrize(
    ("tags", "names", "message"),
    [
        ("manylinux_2_29_x86_64", ["h2o_cpp/_core.so"], "expected a wheel for one of"),
        ("musllinux_1_3_x86_64", ["h2o_cpp/_core.so"], "expected a wheel for one of"),
        ("linux_x86_64", ["h2o_cpp/_core.so"], "expected a wheel for one of"),
        ("musllinux_1_2_x86_64", ["h2o_cpp.libs/libstdc++.so.6"], r"got h2o_cpp\.libs/libstdc"),
    ],
)
def test_rejected_wheels(
    release: ModuleType, tmp_path: Path, tags: str, names: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        release.check_audited(wheel(tmp_path, tags, *names))


def test_cuda_wheels_may_require_the_build_machines_libc(
    release: ModuleType, tmp_path: Path
) -> None:
    release.check_audited(wheel(tmp_path, "manylinux_2_36_x86_64", "_core.so"), any_libc=True)
    other = wheel(tmp_path, "linux_x86_64", "_core.so")  # auditwheel found no matching tag
    with pytest.raises(SystemExit, match="expected a wheel for one of"):
        release.check_audited(other, any_libc=True)


def test_cuda_wheels_have_a_local_version(release: ModuleType, tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    shutil.copy(TOOL.parents[1] / "pyproject.toml", project)
    before = set(project.read_text().splitlines())
    release.name_cuda(tmp_path)
    after = set(project.read_text().splitlines())
    [version] = before - after
    assert version.startswith('version = "')
    assert after - before == {f'{version[:-1]}+cuda"'}


def test_archive_depends_only_on_files_and_time(release: ModuleType) -> None:
    files = {"b/h2o.h": b"header", "b/LICENSE": b"license"}
    packed = release.archive(files, 1_700_000_000)
    assert release.archive(dict(reversed(files.items())), 1_700_000_000) == packed
    assert release.archive(files, 1_700_000_001) != packed
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as tar:
        assert tar.getnames() == ["b/LICENSE", "b/h2o.h"]
        members = [(i.mtime, i.uid, i.mode) for i in tar.getmembers()]
        assert members == [(1_700_000_000, 0, 0o644)] * 2
        header = tar.extractfile("b/h2o.h")
        assert header is not None
        assert header.read() == b"header"


def test_zip_archive_depends_only_on_files_and_time(release: ModuleType) -> None:
    files = {"b/h2o.h": b"header", "b/LICENSE": b"license"}
    packed = release.zip_archive(files, 1_700_000_000)
    assert release.zip_archive(dict(reversed(files.items())), 1_700_000_000) == packed
    with ZipFile(io.BytesIO(packed)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == files
        assert {info.date_time for info in archive.infolist()} == {(2023, 11, 14, 22, 13, 20)}


def test_manifests_have_the_checksums_of_files(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = release.version_of(TOOL.parents[1])
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for name in (
        f"h2o_cpp-{version}.tar.gz",
        f"libh2o-{version}-windows-x86_64.zip",
        f"h2o_cpp-{version}-{tag}-{tag}-manylinux_2_28_{platform.machine()}.whl",
    ):
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.setattr(release, "bill_of_materials", lambda wheel, source, to, at: to.touch())
    args = argparse.Namespace(out=tmp_path, url="https://example.org/files")
    assert release.release_manifests(args, TOOL.parents[1], tmp_path / "none") == 0
    sdist = hashlib.sha256(f"h2o_cpp-{version}.tar.gz".encode()).hexdigest()
    for name in ("recipe.yaml", "libh2o.rb"):
        text = (tmp_path / name).read_text()
        assert f"https://example.org/files/h2o_cpp-{version}.tar.gz" in text
        assert sdist in text
    assert "$" not in (tmp_path / "h2o-cpp.libh2o.installer.yaml").read_text().split("\n", 1)[1]
    sums = dict(
        line.split("  ")[::-1] for line in (tmp_path / "SHA256SUMS").read_text().split("\n")[:-1]
    )
    assert sums.keys() == {path.name for path in tmp_path.iterdir()} - {"SHA256SUMS"}
    assert sums[f"h2o_cpp-{version}.tar.gz"] == sdist
