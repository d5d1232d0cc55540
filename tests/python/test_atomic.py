"""Output files are written completely or not at all; errors while writing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from h2o_cpp.cli.files import check_outputs
from h2o_cpp.files.atomic import atomic_output, check_output
from support.needs import needs


def write(output: Path, error: OSError | None) -> None:
    with atomic_output(output) as path:
        if error is None:
            path.open("rb")  # does not exist yet
        path.write_bytes(b"x")
        raise error or AssertionError


def fail(output: Path, error: OSError | None) -> OSError:
    """The OSError after `error` (None: no such file) was raised while writing `output`."""
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the callers check it
        write(output, error)
    assert list(output.parent.iterdir()) == []
    assert f".{output.name}." not in str(caught.value)
    return caught.value


def test_output_appears_when_complete(tmp_path: Path) -> None:
    with atomic_output(tmp_path / "out") as path:
        path.write_bytes(b"x")
        assert not (tmp_path / "out").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@needs("a user other than root", hasattr(os, "geteuid") and os.geteuid() != 0)
@pytest.mark.parametrize("overwrite", [True, False])
def test_read_only_directory_is_found_before_anything_is_computed(
    tmp_path: Path, overwrite: bool
) -> None:
    (tmp_path / "out").touch()
    tmp_path.chmod(0o555)
    try:
        for name in ("out", "new"):
            with pytest.raises(PermissionError) as error:
                check_output(tmp_path / name, overwrite=overwrite)
            assert error.value.filename == str(tmp_path)
        check_outputs(csv=tmp_path / "out")  # which is written in place
        with pytest.raises(PermissionError):
            check_outputs(csv=tmp_path / "new")
    finally:
        tmp_path.chmod(0o755)


def test_no_space_names_output(tmp_path: Path) -> None:
    output = tmp_path / "out"
    error = fail(output, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert (error.errno, error.filename) == (errno.ENOSPC, str(output))


def test_short_write_names_output(tmp_path: Path) -> None:
    """numpy raises this OSError, without errno."""
    error = fail(tmp_path / "out", OSError("4096 requested and 0 written"))
    assert (
        str(error)
        == f"{tmp_path / 'out'}: the file could not be written completely; is the disk full?"
    )


def test_error_names_output_not_temporary_file(tmp_path: Path) -> None:
    error = fail(tmp_path / "out", None)
    assert isinstance(error, FileNotFoundError)
    assert error.filename == str(tmp_path / "out")


def test_error_about_another_file_is_unchanged(tmp_path: Path) -> None:
    source = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "weights.bin")
    assert fail(tmp_path / "out", source) is source


def test_too_long_temporary_name_is_error_about_output(tmp_path: Path) -> None:
    output = tmp_path / ("x" * 250)
    with pytest.raises(OSError, match="x" * 250) as caught, atomic_output(output) as path:
        path.write_bytes(b"")
    assert caught.value.errno == errno.ENAMETOOLONG
    assert caught.value.filename == str(output)
