"""Measurements in a file of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from h2o_cpp.model.atomic import atomic_output

GPU_SECTIONS = range(10, 18)


@dataclass(frozen=True)
class Record:
    """Values of one measure of an engine on a model; several records add up.

    section: of the report; 0 is the machine, and GPU_SECTIONS are of a GPU. measure: "absent" for
    an engine that could not be measured, and then `note` says why; "command" for the command that
    measured the section, which is the note. Both have no values. Otherwise `note` is a version, or
    whatever there is to say.
    """

    section: int
    model: str
    engine: str
    measure: str
    values: tuple[float, ...] = ()
    note: str = ""


class ResultsError(Exception):
    """Results could not be written; the file has those before them."""


class Results:
    """A file of records, written immediately. Methods that write raise ResultsError."""

    def __init__(self, path: Path) -> None:
        """The file may not exist."""
        self._path = path

    @property
    def path(self) -> Path:
        return self._path

    def add(self, record: Record) -> None:
        line = _line(record).encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    while line:
                        line = line[file.write(line) :]
                except OSError:
                    os.ftruncate(file.fileno(), end)  # no part of a line
                    raise
        except OSError as error:
            raise self._error(error) from None

    def forget(self, sections: Iterable[int]) -> None:
        """Remove sections before measuring them again."""
        gone = set(sections)
        self._keep(record for record in self if record.section not in gone)

    def forget_command(self, command: str) -> None:
        """Remove what a command has measured, before it runs again."""
        kept, is_its = [], False
        for record in self:
            if record.measure == "command":
                is_its = record.note == command
            if not is_its:
                kept.append(record)
        self._keep(kept)

    def _keep(self, records: Iterable[Record]) -> None:
        lines = [_line(record) for record in records]
        try:
            with atomic_output(self._path) as temporary:
                temporary.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> ResultsError:
        return ResultsError(f"{self._path.name}: {error.strerror}")

    def __iter__(self) -> Iterator[Record]:
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                fields = json.loads(line)
                yield Record(**{**fields, "values": tuple(fields["values"])})


def _line(record: Record) -> str:
    return json.dumps(asdict(record)) + "\n"
