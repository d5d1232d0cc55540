"""Charts of rows: a panel for each of some values, in it a line for each of others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

from h2o_bench.results import Row
from h2o_cpp.measure.plots import new_figure


class Chart(NamedTuple):
    """Columns of rows. Samples of `y` are drawn as their median, or as mean and standard error."""

    panel: str
    line: str
    x: str
    y: Sequence[str]  # a row of panels for each
    has_errors: bool = False
    level: str | None = None  # a line with one point, at the end of every other line
    log: bool = False


def draw(chart: Chart, rows: Sequence[Row], path: Path) -> None:
    """Draw to a file. Raises ValueError without matplotlib."""
    panels = list(dict.fromkeys(row[chart.panel] for row in rows if chart.panel in row))
    figure = new_figure(4 * max(1, len(panels)), 3.2 * len(chart.y))
    grid = figure.subplots(len(chart.y), max(1, len(panels)), squeeze=False, sharex="col")
    for y, row_of_axes in zip(chart.y, grid, strict=True):
        for panel, axes in zip(panels, row_of_axes, strict=True):
            found = [row for row in rows if row.get(chart.panel) == panel and row.get(y)]
            levels = [row for row in found if row[chart.line] == chart.level]
            for name in dict.fromkeys(row[chart.line] for row in found if row not in levels):
                line = [row for row in found if row[chart.line] == name] + levels
                points = sorted((row[chart.x], *_point(row[y], chart.has_errors)) for row in line)
                x, heights, errors = zip(*points, strict=True)
                axes.errorbar(
                    x, heights, errors if chart.has_errors else None, marker="o", markersize=3,
                    label=name,
                )  # fmt: skip
            for row in levels:
                axes.axhline(_point(row[y], False)[0], linestyle="--", color="black", linewidth=0.8)
            axes.set_title(panel, fontsize=9)
            if chart.log:
                axes.set_xscale("log", base=2)
                axes.set_ylim(bottom=0)
        row_of_axes[0].set_ylabel(y)
    for axes in grid[-1]:
        axes.set_xlabel(chart.x)
    grid[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _point(samples: float | Sequence[float], is_mean: bool) -> tuple[float, float]:
    """A height and its error."""
    if not isinstance(samples, Sequence):
        return float(samples), 0.0
    if not is_mean or len(samples) < 2:
        return median(samples), 0.0
    return fmean(samples), stdev(samples) / len(samples) ** 0.5
