"""Measurements in a file of JSON lines: the only form of results."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

from h2o_cpp.files.atomic import atomic_output

# Cells by column. A list has samples. "table" names one of several tables of results. "absent"
# says why something was not measured. Names that begin with _ are in no table.
Row: TypeAlias = Mapping[str, Any]


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results; numbers with a point are Decimals, with digits as written."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_float=Decimal) for line in lines]


class ResultsError(Exception):
    """Results could not be written; the file has those before them."""


class Results:
    """A file of rows, each written when it is known. Methods that write raise ResultsError."""

    def __init__(self, path: Path, about: Mapping[str, str], replaced: str = "command") -> None:
        """about: what every line says besides its row, such as the command.

        Lines that are there with the same value of `replaced` are removed. The file may not exist.
        """
        self._path = path
        self._about = dict(about)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if json.loads(line)[replaced] != about[replaced]]
        if len(kept) == len(lines):
            return
        try:
            with atomic_output(path) as temporary:
                temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        except OSError as error:
            raise self._error(error) from None

    def add(self, row: Row) -> None:
        """Append a row; a line that cannot be written whole is not written."""
        line = (json.dumps({**self._about, "row": row}) + "\n").encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    while line:
                        line = line[file.write(line) :]
                except OSError:
                    os.ftruncate(file.fileno(), end)
                    raise
        except OSError as error:
            raise self._error(error) from None

    def rows(self) -> list[Row]:
        """All rows of this measurement, of earlier commands too."""
        if not self._path.exists():
            return []
        lines = map(json.loads, self._path.read_text(encoding="utf-8").splitlines())
        return [line["row"] for line in lines if line["name"] == self._about["name"]]

    def _error(self, error: OSError) -> ResultsError:
        return ResultsError(f"{self._path.name}: {error.strerror}")
