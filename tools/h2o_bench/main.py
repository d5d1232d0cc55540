"""The program tools/bench: runs one measurement, keeps its results and prints its tables.

A measurement is a module of `measurements`: the first line of its docstring is its help,
add_arguments(parser) and measure(args), which yields rows (results.py), are what it does. It may
have BASE, an engine that others are compared with, and CHART (chart.py).
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from h2o_bench.chart import draw
from h2o_bench.results import Results, ResultsError, Row
from h2o_bench.tables import digits, markdown, put_between
from h2o_cpp import __version__
from h2o_cpp.measure.machine import processor

_FOLDER = Path(__file__).parent / "measurements"


def names() -> dict[str, str]:
    """Describes each measurement in a line."""
    files = sorted(path for path in _FOLDER.glob("*.py") if path.stem != "__init__")
    texts = {path.stem: ast.get_docstring(ast.parse(path.read_text("utf-8"))) for path in files}
    return {name: (text or "").splitlines()[0] for name, text in texts.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure. Returns 1 if the results could not be written or read as asked."""
    argv = sys.argv[1:] if argv is None else argv
    lines = names()
    if not argv or argv[0] not in lines:
        parser = argparse.ArgumentParser(
            prog="tools/bench", formatter_class=argparse.RawDescriptionHelpFormatter,
            description="Measures h2o.cpp, and other engines beside it.",
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="add each result to JSON lines")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the tables into a page")
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
    try:
        results = None if args.json is None else Results(args.json, _about(name, command))
        rows: list[Row] = []
        for row in module.measure(args):
            rows.append(row)
            if results is not None:
                results.add(row)
            print(_line(row), file=sys.stderr, flush=True)
        rows = rows if results is None else results.rows()
        if getattr(args, "plot", None) is not None:
            draw(module.CHART, [row for row in rows if "absent" not in row], args.plot)
        text = f"`{command}`; {processor()}\n\n{markdown(rows, getattr(module, 'BASE', None))}"
        if args.into is None:
            print(text, end="")
        else:
            put_between(args.into, name, text)
    except (ResultsError, OSError, ValueError, MemoryError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _about(name: str, command: str) -> dict[str, str]:
    machine = processor()
    return {"name": name, "command": command, "machine": machine, "version": __version__}


def _line(row: Row) -> str:
    """A row as it is told while others are measured."""
    cells = (
        f"{key} {', '.join(map(digits, value[:3]))}{', ...' if len(value) > 3 else ''}"
        if isinstance(value, list)
        else f"{key} {digits(value)}"
        for key, value in row.items()
    )
    return "; ".join(cells)
