"""The program tools/bench: runs one measurement, keeps its results and prints its tables.

A measurement is a module of `measurements`: the first line of its docstring is its help,
add_arguments(parser) and measure(args), which yields rows (results.py), are what it does. It may
have BASE, an engine that others are compared with, and CHART (chart.py). `tools/bench records`
draws the tables of docs/measured again.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib import import_module
from pathlib import Path

from h2o_bench.chart import draw
from h2o_bench.results import Results, ResultsError, Row
from h2o_bench.tables import digits, markdown, redraw
from h2o_cpp import __version__
from h2o_cpp.measure.machine import processor

_FOLDER = Path(__file__).parent / "measurements"
_RECORDS = Path(__file__).parents[2] / "docs" / "measured"


def names() -> dict[str, str]:
    """Describes each measurement in a line."""
    files = sorted(path for path in _FOLDER.glob("*.py") if path.stem != "__init__")
    texts = {path.stem: ast.get_docstring(ast.parse(path.read_text("utf-8"))) for path in files}
    return {name: (text or "").splitlines()[0] for name, text in texts.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure. Returns 1 if the results could not be written or read as asked."""
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["records"]:
        for record in _RECORDS.glob("*.md"):
            record.write_text(redraw(record), encoding="utf-8")
        return 0
    lines = names()
    if not argv or argv[0] not in lines:
        parser = argparse.ArgumentParser(
            prog="tools/bench", formatter_class=argparse.RawDescriptionHelpFormatter,
            description="Measures h2o.cpp, and other engines beside it. The name `records` draws "
            "the tables of docs/measured again from the results beside them.",
            epilog="\n".join(f"  {name:14} {line}" for name, line in lines.items()),
        )  # fmt: skip
        parser.add_argument("name", choices=lines, metavar="NAME", help="--help after it says more")
        parser.parse_args(argv)
    name, *words = argv
    module = import_module(f"h2o_bench.measurements.{name}")
    parser = argparse.ArgumentParser(
        prog=f"tools/bench {name}", formatter_class=argparse.RawDescriptionHelpFormatter,
        description=module.__doc__,
    )  # fmt: skip
    module.add_arguments(parser)
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--json", type=Path, metavar="FILE", help="add each result to JSON lines")
    kept.add_argument(
        "--into",
        metavar="PAGE.md[#TABLE]",
        help="write the results of a table to PAGE.jsonl and draw it (default of TABLE: the NAME)",
    )
    if hasattr(module, "CHART"):
        parser.add_argument(
            "--plot",
            type=Path,
            metavar="FILE.svg",
            help="draw the results as a light and a dark SVG beside FILE.svg",
        )
    args = parser.parse_args(words)
    # Without directories of this machine.
    command = " ".join(["tools/bench", name, *(Path(word).name for word in words)])
    page, _, table = (args.into or "").partition("#")
    file = Path(page).with_suffix(".jsonl") if page else args.json
    base = getattr(module, "BASE", None)
    about = _about(table or name, command) | ({} if base is None else {"base": base})
    try:
        results = None if file is None else Results(file, about, "name" if page else "command")
        rows: list[Row] = []
        for row in module.measure(args):
            rows.append(row)
            if results is not None:
                results.add(row)
            print(_line(row), file=sys.stderr, flush=True)
        rows = rows if results is None else results.rows()
        if getattr(args, "plot", None) is not None:
            draw(module.CHART, [row for row in rows if "absent" not in row], args.plot)
        if page:
            Path(page).write_text(redraw(Path(page)), encoding="utf-8")
        else:
            print(f"`{command}`; {processor()}\n\n{markdown(rows, base)}", end="")
    except (ResultsError, OSError, ValueError, MemoryError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _about(name: str, command: str) -> dict[str, str]:
    git = ["git", "-C", str(_FOLDER), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        commit = ""
    return {
        "name": name, "command": command, "machine": processor(), "version": __version__,
        "date": date.today().isoformat(), "commit": commit,
    }  # fmt: skip


def _line(row: Row) -> str:
    """A row as it is told while others are measured."""
    cells = (
        f"{key} {', '.join(map(digits, value[:3]))}{', ...' if len(value) > 3 else ''}"
        if isinstance(value, list)
        else f"{key} {digits(value)}"
        for key, value in row.items()
    )
    return "; ".join(cells)
