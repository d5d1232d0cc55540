"""The figure of section 2: tokens per second and memory against context."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median

from h2o_bench.report import Values
from h2o_cpp.measure.plots import new_figure


def _n_contexts(engines: Mapping[str, Mapping[str, object]]) -> int:
    decodes = {name for found in engines.values() for name in found if name.startswith("decode")}
    return len({name.split()[1] for name in decodes})


def plot_contexts(values: Values, path: Path) -> None:
    """A column per model, a line per cache.

    Raises ValueError without matplotlib.
    """
    several = {model: engines for model, engines in values.items() if _n_contexts(engines) > 1}
    values = several or values
    figure = new_figure(5 * len(values), 7)
    grid = figure.subplots(2, len(values), squeeze=False, sharex="col")
    for column, (model, engines) in enumerate(values.items()):
        for axes, suffix, scale in ((grid[0][column], "", 1.0), (grid[1][column], " rss", 2**20)):
            for name, measures in engines.items():
                points = sorted(
                    (int(measure.split()[1]), median(found) / scale)
                    for measure, found in measures.items()
                    if measure.startswith("decode") and measure.endswith(" rss") == bool(suffix)
                )
                if points:
                    axes.plot(*zip(*points, strict=True), marker="o", label=name)
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
        grid[0][column].set_title(model)
        grid[1][column].set_xlabel("context, tokens")
    grid[0][0].set_ylabel("tokens/s")
    grid[1][0].set_ylabel("MiB resident")
    grid[0][0].legend()
    figure.savefig(path, dpi=120)
