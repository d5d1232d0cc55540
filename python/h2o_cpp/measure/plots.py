"""Figures with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A larger ratio of values is drawn on a logarithmic axis.
_LARGE_RANGE = 10.0


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches. Raises ValueError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('a plot needs matplotlib: pip install "h2o-cpp[eval]"') from None
    return Figure(figsize=(width, height), layout="constrained")


def draw_budgets(axes: Axes, points: Sequence[tuple[str, float, float]], full: float) -> None:
    """Draw a line per policy through its points (policy, budget, value).

    full: the full cache's value, a horizontal line; none for nan.
    """
    for policy in dict.fromkeys(name for name, _, _ in points):
        line = sorted((budget, value) for name, budget, value in points if name == policy)
        axes.plot(*zip(*line, strict=True), marker="o", label=policy)
    values = [value for _, _, value in points]
    if not isnan(full):
        axes.axhline(full, linestyle="--", color="black", label="full")
        values.append(full)
    if min(values) > 0 and max(values) > _LARGE_RANGE * min(values):
        axes.set_yscale("log")
    axes.set_xlabel("budget, fraction of the context")
    axes.legend(fontsize="small")
