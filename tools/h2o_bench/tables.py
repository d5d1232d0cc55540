"""Rows as Markdown tables, and tables in pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from h2o_bench.results import Row


def markdown(rows: Iterable[Row], base: str | None = None) -> str:
    """A table for each value of "table", then what was not measured.

    base: an engine; medians of other engines' samples, in rows whose other words are the same, are
    followed by its median divided by theirs.
    """
    rows = list(rows)
    lines: list[str] = []
    for title in dict.fromkeys(row.get("table", "") for row in rows):
        found = [row for row in rows if row.get("table", "") == title and "absent" not in row]
        keys = dict.fromkeys(key for row in found for key in row)
        columns = [key for key in keys if key != "table" and key[:1] != "_"]
        lines += [f"### {title}", ""] if title else []
        if found:
            cells = [[_cell(row, key, _base(row, found, base)) for key in columns] for row in found]
            lines += [tabulate(cells, columns, tablefmt="github", disable_numparse=True), ""]
        lines += _absent(row for row in rows if row.get("table", "") == title and "absent" in row)
    return "\n".join(lines).rstrip() + "\n"


def _base(row: Row, rows: Sequence[Row], base: str | None) -> Row | None:
    """The row of the base engine that a row is compared with."""
    if base is None or row.get("engine") == base:
        return None
    kinds, own = (str, int), ("engine", "version")
    words = {k: v for k, v in row.items() if isinstance(v, kinds) and k not in own}
    for other in rows:
        if other.get("engine") == base and words.items() <= dict(other).items():
            return other
    return None


def _cell(row: Row, key: str, base: Row | None) -> str:
    value = row.get(key)
    if not isinstance(value, list):
        return "" if value is None else digits(value)
    if not value:
        return ""
    text = digits(median(value))
    if len(value) > 1:
        text += f" ({digits(min(value))} to {digits(max(value))})"
    if base is not None and base.get(key):
        text += f" **{median(base[key]) / median(value):.2f}x**"
    return text


def digits(value: Any) -> str:
    """A number with three digits, or more before its point."""
    if not isinstance(value, float):
        return str(value)
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 4}f}"


def _absent(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each reason, with all that it is about."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        what = ", ".join(str(v) for k, v in row.items() if k not in ("absent", "table"))
        reasons.setdefault(row["absent"], []).append(what)
    if reasons:
        yield from ("Not measured:", "")
        yield from (f"- {'; '.join(dict.fromkeys(w))}: {reason}" for reason, w in reasons.items())
        yield ""


def put_between(page: Path, name: str, table: str) -> None:
    """Replace the table between <!-- name --> and <!-- /name -->. Raises ValueError without
    markers."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"{page} has no markers {begin.strip()} and {end.strip()}")
    page.write_text(f"{before}{begin}{table}{end}{after}", encoding="utf-8")
