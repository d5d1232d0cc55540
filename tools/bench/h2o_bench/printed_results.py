"""Results that are also printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from h2o_bench.records import Record, Results


class PrintedResults(Results):
    """Results that are also printed."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        super().__init__(path)
        self._tell = tell

    def add(self, record: Record) -> None:
        super().add(record)
        values = ", ".join(f"{value:.6g}" for value in record.values[:3])
        if len(record.values) > 3:
            values += ", ..."
        self._tell(f"{record.model}; {record.engine}; {record.measure}: {values or record.note}")
