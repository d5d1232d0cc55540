"""Measurements in a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

GPU_SECTIONS = range(10, 15)


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


class Results:
    """A file of records, written immediately."""

    def __init__(self, path: Path) -> None:
        """The file may not exist."""
        self._path = path

    def add(self, record: Record) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")

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
        lines = [json.dumps(asdict(record)) + "\n" for record in records]
        self._path.write_text("".join(lines), encoding="utf-8")

    def __iter__(self) -> Iterator[Record]:
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                fields = json.loads(line)
                yield Record(**{**fields, "values": tuple(fields["values"])})
