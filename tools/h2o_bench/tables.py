"""Rows as Markdown tables, and records: pages whose tables show the results beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any

from h2o_bench.results import Row, read

TABLE = re.compile(r"(<!-- (\S+) -->\n).*?(<!-- /\2 -->\n)", re.DOTALL)
_WRITTEN = 6  # a number with up to so many digits was rounded already


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
            lines += [f"| {' | '.join(one)} |" for one in (columns, ["---"] * len(columns), *cells)]
            lines.append("")
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
        text += f" **{float(median(base[key]) / median(value)):.2f}x**"
    return text


def digits(value: Any) -> str:
    """A number with three digits, or more before its point; a Decimal that has few, as it is."""
    if isinstance(value, Decimal) and len(value.as_tuple().digits) > _WRITTEN:
        value = float(value)
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


def redraw(page: Path) -> str:
    """A record with the tables of PAGE.jsonl between <!-- NAME --> and <!-- /NAME -->.

    Raises ValueError if a table has no results, or results have no table.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for line in read(page.with_suffix(".jsonl")):
        found.setdefault(line["name"], []).append(line)
    text = page.read_text(encoding="utf-8")
    marked = [match[2] for match in TABLE.finditer(text)]
    if different := found.keys() ^ set(marked):
        raise ValueError(
            f"{page.name}: got {', '.join(sorted(different))} only among its tables or only among "
            f"the results of {page.stem}.jsonl, expected both"
        )
    return TABLE.sub(lambda match: match[1] + _record(found[match[2]]) + match[3], text)


def _record(lines: Sequence[Mapping[str, Any]]) -> str:
    """How, where and when results were measured, as far as it is known, and their table."""
    commands = dict.fromkeys(command for line in lines for command in line["command"].splitlines())
    text = "\n".join(["```sh", *commands, "```", ""]) if commands else ""
    text += "; ".join(filter(None, dict.fromkeys(map(_where, lines))))
    table = markdown([line["row"] for line in lines], lines[0].get("base"))
    return f"{text}\n\n{table}" if text else table


def _where(line: Mapping[str, Any]) -> str:
    commit = f"commit {line['commit']}" if line["commit"] else ""
    return ", ".join(filter(None, (line["machine"], line["date"], commit)))
