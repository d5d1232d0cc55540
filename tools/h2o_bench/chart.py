"""Charts of rows as SVG: each line is labeled at its end, and a chart has a light and a dark file.

A panel has the same lines as the others, for one column of heights and one value of `panel`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

from h2o_bench.results import Row

_PER_ROW = 2  # panels
_LEFT, _WIDTH, _LABELS = 48, 226, 146  # of a panel, in pixels
_TOP, _HEIGHT, _BOTTOM = 34, 190, 40
_APART = 32  # labels of two lines of text
_THEMES = {
    "light": {
        "ink": "#1f2328", "dim": "#59636e", "grid": "#d8dee4", "ground": "#ffffff",
        "lines": ("#0b7285", "#b85c00", "#7a5af5", "#217a36"),
    },
    "dark": {
        "ink": "#e6edf3", "dim": "#9aa4af", "grid": "#30363d", "ground": "#0d1117",
        "lines": ("#3bc9db", "#f5a742", "#a594f9", "#51cf66"),
    },
}  # fmt: skip


class Chart(NamedTuple):
    """Columns of rows. Samples are drawn as their median, or as mean and standard error."""

    line: str
    x: str
    y: Mapping[str, str]  # columns of heights, with their titles
    x_title: str | None = None  # (default: x)
    panel: str | None = None
    has_errors: bool = False
    level: str | None = None  # a line with one point, drawn across the panel
    labels: Mapping[str, str] | None = None  # "name, detail" of the drawn lines (default: all)


class _Line(NamedTuple):
    label: str
    color: str
    points: list[tuple[float, float, float]]  # x, height, error


def draw(chart: Chart, rows: Sequence[Row], path: Path) -> list[Path]:
    """Draw beside `path`: name-light.svg and name-dark.svg. Raises ValueError without rows."""
    if not any(row.get(column) for row in rows for column in chart.y):
        raise ValueError(f"no row has {' or '.join(chart.y)} to draw")
    written = []
    for name, theme in _THEMES.items():
        file = path.with_name(f"{path.stem}-{name}.svg")
        file.write_text("\n".join(_picture(chart, rows, theme)) + "\n", encoding="utf-8")
        written.append(file)
    return written


def _picture(chart: Chart, rows: Sequence[Row], theme: Mapping[str, object]) -> Iterator[str]:
    values = list(dict.fromkeys(row[chart.panel] for row in rows)) if chart.panel else [None]
    panels = [(column, value) for value in values for column in chart.y]
    width = _LEFT + _WIDTH + _LABELS
    height = _TOP + _HEIGHT + _BOTTOM
    n_columns = min(_PER_ROW, len(panels))
    size = f"{n_columns * width} {math.ceil(len(panels) / n_columns) * height}"
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img">'
    yield f"<title>{escape(' and '.join(chart.y.values()))} against {escape(chart.x)}</title>"
    yield "<style>"
    yield 'text { font: 14px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }'
    yield ".strong { font-weight: 600; } .small { font-size: 12.5px; }"
    yield ".end { text-anchor: end; } .middle { text-anchor: middle; }"
    yield "</style>"
    yield f'<rect width="100%" height="100%" rx="6" fill="{theme["ground"]}"/>'
    for i, (column, value) in enumerate(panels):
        found = [row for row in rows if chart.panel is None or row[chart.panel] == value]
        title = chart.y[column] if value is None else f"{value}: {chart.y[column]}"
        yield f'<g transform="translate({i % n_columns * width} {i // n_columns * height})">'
        yield from _panel(chart, title, _lines(chart, found, column, theme), theme)
        yield "</g>"
    yield "</svg>"


def _lines(
    chart: Chart, rows: Sequence[Row], column: str, theme: Mapping[str, object]
) -> list[_Line]:
    rows = [row for row in rows if row.get(column)]
    labels = chart.labels or {row[chart.line]: row[chart.line] for row in rows}
    colors = theme["lines"]
    assert isinstance(colors, tuple)
    lines = []
    for i, (name, label) in enumerate(labels.items()):
        points = [
            (float(row[chart.x]), *_point(row[column], chart.has_errors))
            for row in rows
            if row[chart.line] == name
        ]
        if points:
            lines.append(_Line(label, colors[i % len(colors)], sorted(points)))
    return lines


def _point(samples: float | Sequence[float], is_mean: bool) -> tuple[float, float]:
    """A height and its error."""
    if not isinstance(samples, Sequence):
        return float(samples), 0.0
    if not is_mean or len(samples) < 2:
        return median(samples), 0.0
    return fmean(samples), stdev(samples) / len(samples) ** 0.5


class _Scale(NamedTuple):
    """Maps values to pixels of a panel."""

    right: float
    top: float
    x_step: float
    y_step: float

    def across(self, x: float) -> float:
        return _LEFT + _WIDTH * x / self.right

    def down(self, y: float) -> float:
        return _TOP + _HEIGHT * (1 - y / self.top)


def _scale(chart: Chart, lines: Sequence[_Line]) -> _Scale:
    highest = max((y + error for line in lines for _, y, error in line.points), default=1.0)
    drawn = [line for line in lines if line.label != chart.level] or lines
    right = max((x for line in drawn for x, _, _ in line.points), default=1.0)
    y_step = _step(highest)
    return _Scale(right, y_step * math.ceil(highest / y_step), _step(right), y_step)


def _panel(
    chart: Chart, title: str, lines: Sequence[_Line], theme: Mapping[str, object]
) -> Iterator[str]:
    scale = _scale(chart, lines)
    yield f'<text x="12" y="20" class="strong" fill="{theme["ink"]}">{escape(title)}</text>'
    yield from _axes(chart, scale, theme)
    ends = _apart([scale.down(line.points[-1][1]) for line in lines])
    for line, end in zip(lines, ends, strict=True):
        points = [
            (scale.across(x), scale.down(y), _HEIGHT * error / scale.top)
            for x, y, error in line.points
        ]
        if line.label == chart.level:
            points = [(x, points[0][1], 0.0) for x in (_LEFT, _LEFT + _WIDTH)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        yield (
            f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="2.5" '
            'stroke-linejoin="round"/>'
        )
        for x, y, error in points:
            if error > 0:
                yield (
                    f'<path d="M{x:.1f} {y - error:.1f}v{2 * error:.1f}" stroke="{line.color}"/>'
                )
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.color}"/>'
        left = _LEFT + _WIDTH + 10
        name, _, detail = line.label.partition(", ")
        value = _number(line.points[-1][1])
        yield (
            f'<text x="{left}" y="{end:.1f}" class="small strong" fill="{line.color}">'
            f"{escape(name)}<tspan>: {value}</tspan>"
            f'<tspan x="{left}" dy="14" font-weight="400">{escape(detail)}</tspan></text>'
        )


def _axes(chart: Chart, scale: _Scale, theme: Mapping[str, object]) -> Iterator[str]:
    dim, bottom = theme["dim"], _TOP + _HEIGHT
    for i in range(round(scale.top / scale.y_step) + 1):
        y = scale.down(i * scale.y_step)
        yield f'<path d="M{_LEFT} {y:.1f}h{_WIDTH}" stroke="{theme["grid"]}"/>'
        yield (
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="small end" fill="{dim}">'
            f"{_number(i * scale.y_step)}</text>"
        )
    for i in range(int(scale.right / scale.x_step) + 1):
        yield (
            f'<text x="{scale.across(i * scale.x_step):.1f}" y="{bottom + 17}" '
            f'class="small middle" fill="{dim}">{_number(i * scale.x_step)}</text>'
        )
    yield (
        f'<text x="{_LEFT + _WIDTH / 2}" y="{bottom + 33}" class="small middle" '
        f'fill="{dim}">{escape(chart.x_title or chart.x)}</text>'
    )


def _apart(heights: Sequence[float]) -> list[float]:
    """Heights of labels: near those of the ends of lines, in the same order, without overlap."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    found = list(heights)
    lowest = _TOP + _HEIGHT - 10.0
    for i in reversed(order):  # from the bottom up
        found[i] = lowest = min(found[i], lowest)
        lowest -= _APART
    highest = _TOP + 4.0
    for i in order:
        found[i] = highest = max(found[i], highest)
        highest += _APART
    return found


def _step(largest: float) -> float:
    """The distance of three to five marks: 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(largest / 4 if largest > 0 else 1.0))
    return next(step for m in (1, 2, 2.5, 5, 10) if (step := m * power) * 5 >= largest)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"
