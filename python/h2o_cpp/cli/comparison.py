"""Options and output of commands that measure every policy at every budget."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_cpp.budget.policy import POLICIES
from h2o_cpp.cli.argument_types import fractions, names
from h2o_cpp.cli.cache_options import add_archive, add_kv_dtype, options_of
from h2o_cpp.cli.files import STANDARD, check_outputs
from h2o_cpp.cli.options import add_json, add_threads
from h2o_cpp.cli.output import put_json
from h2o_cpp.cli.parser import Arguments
from h2o_cpp.measure.budgets import Comparison
from h2o_cpp.measure.plots import new_figure
from h2o_cpp.options import ArchiveOptions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from matplotlib.figure import Figure

    Row = TypeVar("Row", bound=DataclassInstance)


def add_budgets(parser: Arguments, default: Sequence[float], of: str = "n-ctx") -> None:
    """Add --policy and --hh, with lists to compare; of: what the budgets are fractions of."""
    parser.add_argument(
        "--policy",
        type=names,
        default=["h2o", "mean", "window", "sinks"],
        metavar="NAME,...",
        help=f"policies to compare: {', '.join(POLICIES)} (default: h2o,mean,window,sinks); the "
        "full cache is always measured",
    )
    shown = ",".join(map(str, default))
    parser.add_argument(
        "--hh", "--budget", dest="budget", type=fractions, metavar="X,...", default=[*default],
        help=f"fractions of {of} that are kept (default: {shown})",
    )  # fmt: skip


def add_comparison(parser: Arguments, plot: str) -> None:
    """Add the other common options; plot: help of --plot."""
    add_kv_dtype(parser)
    parser.add_argument(
        "--equal-bytes",
        action="store_true",
        help="budgets are shares of the bytes of a full f16 cache; keep as many tokens as fit, in "
        "--kv-dtype or else f16 or q8_0 (default: shares of --n-ctx)",
    )
    add_archive(parser)
    add_threads(parser)
    add_outputs(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help=plot)


def add_outputs(parser: Arguments) -> None:
    """Add --csv and --json, for show_rows()."""
    parser.add_argument(
        "--csv", type=Path, metavar="FILE",
        help='also write the table to FILE; "-": only as CSV, to stdout (default: no)',
    )  # fmt: skip
    add_json(parser)


def open_figure(args: argparse.Namespace, width: float) -> Figure | None:
    """The figure for --plot, `width` inches wide.

    Raises an error if an output of the command cannot be written.
    """
    check_outputs(csv=args.csv, plot=args.plot, json=STANDARD if args.json else None)
    return None if args.plot is None else figure_for(args.plot, width)


def figure_for(path: Path, width: float) -> Figure:
    """The figure to write to the path of --plot, `width` inches wide."""
    figure = new_figure(width, 4)
    known, ending = figure.canvas.get_supported_filetypes(), path.suffix[1:].lower()
    if ending not in known:
        raise ValueError(f"--plot {path}: expected an ending of {', '.join(sorted(known))}")
    return figure


def shows_table(args: argparse.Namespace) -> bool:
    """Whether stdout has the table."""
    return not args.json and args.csv != STANDARD


def comparison_of(args: argparse.Namespace, n_ctx: int) -> Comparison:
    """The caches that the command compares."""
    return Comparison.of(
        args.policy,
        args.budget,
        equal_bytes=args.equal_bytes,
        n_ctx=n_ctx,
        n_batch=args.n_batch,
        kv_dtype=args.kv_dtype,
        **vars(options_of(args, ArchiveOptions)),
    )


def show_rows(
    args: argparse.Namespace,
    rows: Iterable[Row],
    *,
    total: int,
    columns: Sequence[str],
    cells: Callable[[Row], Sequence[str]],
    settings: dict[str, Any],
    csv_row: Callable[[Row], dict[str, Any]] = asdict,
) -> list[Row]:
    """Print a table, row by row as measured, or JSON with `settings`; write the CSV file.

    Returns the rows.
    """
    table = shows_table(args)
    measured: list[Row] = []
    for row in tqdm(rows, total=total, disable=None, leave=False):
        if table and not measured:  # not before an error
            tqdm.write(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
        measured.append(row)
        if table:
            tqdm.write(f"| {' | '.join(cells(row))} |")
    if args.json:
        found = {**settings, "measured": [_numbers(asdict(row)) for row in measured]}
        put_json(found)
    if args.csv is not None:
        _write_csv(args.csv, [csv_row(row) for row in measured])
    return measured


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as a CSV file, or to stdout."""
    with (
        nullcontext(sys.stdout) if path == STANDARD
        else path.open("w", newline="", encoding="utf-8")
    ) as file:  # fmt: skip
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _numbers(value: Any) -> Any:
    """A value for JSON, which has no infinity and NaN: they become null."""
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value
