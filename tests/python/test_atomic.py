"""Output files that are complete or unchanged, and errors while writing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from h2o_cpp.model.atomic import atomic_output


def write(output: Path, error: OSError | None) -> None:
    with atomic_output(output) as path:
        if error is None:
            path.open("rb")  # not there yet
        path.write_bytes(b"x")
        raise error or AssertionError


def fail(output: Path, error: OSError | None) -> OSError:
    """What is raised when `error` (None: no such file) is raised while writing `output`."""
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the callers look at it
        write(output, error)
    assert list(output.parent.iterdir()) == []
    assert f".{output.name}." not in str(caught.value)
    return caught.value


def test_written(tmp_path: Path) -> None:
    with atomic_output(tmp_path / "out") as path:
        path.write_bytes(b"x")
        assert not (tmp_path / "out").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_no_space(tmp_path: Path) -> None:
    output = tmp_path / "out"
    error = fail(output, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert (error.errno, error.filename) == (errno.ENOSPC, str(output))


def test_a_short_write(tmp_path: Path) -> None:
    """As numpy reports it."""
    error = fail(tmp_path / "out", OSError("4096 requested and 0 written"))
    assert (
        str(error)
        == f"{tmp_path / 'out'}: the file could not be written completely; is the disk full?"
    )


def test_the_temporary_name_is_private(tmp_path: Path) -> None:
    error = fail(tmp_path / "out", None)
    assert isinstance(error, FileNotFoundError)
    assert error.filename == str(tmp_path / "out")


def test_errors_about_another_file(tmp_path: Path) -> None:
    source = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "weights.bin")
    assert fail(tmp_path / "out", source) is source


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    """For the temporary file alone."""
    output = tmp_path / ("x" * 250)
    with pytest.raises(OSError, match="x" * 250) as caught, atomic_output(output) as path:
        path.write_bytes(b"")
    assert caught.value.errno == errno.ENAMETOOLONG
    assert caught.value.filename == str(output)
