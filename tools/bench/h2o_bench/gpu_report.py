"""The GPU part of the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from h2o_bench.engine_names import OURS
from h2o_bench.gpu_sections import GRID, LARGE, LONG, MACHINE, PAPER, PEERS, PREFILL, SCORES
from h2o_bench.gpu_tables import grid, long_text, paper, paper_rows, peers
from h2o_bench.records import Record
from h2o_bench.report import Values, cell, microseconds, not_measured, table, values_of

_Limits = Mapping[str, float]  # "copy" and "f16", per second, if measured


def render_gpu(records: Sequence[Record]) -> str:
    """Markdown: the GPU, and the sections with records."""
    lines = ["# On a GPU", ""]
    for command in dict.fromkeys(r.note for r in records if r.measure == "command"):
        lines += [f"`{command}`", ""]
    versions = {
        f"{r.engine.split()[0].strip(',')} {r.note}"
        for r in records
        if r.measure in ("start", "version")
    }
    if versions:
        lines += [f"{'; '.join(sorted(versions))}.", ""]
    limits: dict[str, float] = {}
    for name, engines in values_of(records, MACHINE).items():
        if "f16" not in engines.get("torch", {}):
            continue
        limits = {measure: values[-1] for measure, values in engines["torch"].items()}
        lines += [f"{name}.", "", *_machine(limits)]
    lines += [*not_measured(records, MACHINE)]
    rows_of_paper: Iterator[str] = paper_rows()  # once
    for number, title, section in (
        (SCORES, "What scores cost", _scores),
        (PREFILL, "Prefill", _prefill),
        (GRID, "Decode by shape, context and batch", grid),
        (LONG, "A long text", long_text),
        (PAPER, "The paper's experiment", paper),
        (LARGE, "The paper's experiment with a larger model", paper),
        (PEERS, "Other engines", peers),
    ):
        if any(r.section == number and r.measure != "command" for r in records):
            lines += [f"## {title}", "", *section(values_of(records, number), limits)]
            if section is paper:
                lines += rows_of_paper
            lines += not_measured(records, number)
    return "\n".join(lines).rstrip() + "\n"


def _machine(limits: _Limits) -> Iterator[str]:
    yield (
        f"By PyTorch, it copies {limits['copy'] / 1e9:.0f} GB/s, bytes read and bytes written"
        f" together, and multiplies f16 matrices at {limits['f16'] / 1e12:.0f} TFLOP/s: the limits"
        " that shares are of."
    )
    yield ""


def _scores(values: Values, limits: _Limits) -> Iterator[str]:
    rows = []
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}  # (bytes, seconds)
    for label, engines in values.items():
        if "bytes" not in engines.get("h2o", {}):  # the last of its records
            continue
        seconds = {name: measures["step seconds"] for name, measures in engines.items()}
        cost = median(seconds["h2o"]) / median(seconds["window"]) - 1
        row = [label, microseconds(seconds["window"]), microseconds(seconds["h2o"])]
        rows.append([*row, f"{cost:+.1%}"])
        for name, measures in engines.items():
            series = points.setdefault((label.rpartition(",")[0], name), [])
            series.append((measures["bytes"][-1], median(seconds[name])))
    yield "Microseconds of a whole step, in a cache that is full: median and quartiles."
    yield ""
    yield from table(["", "window", "h2o", "h2o takes"], rows)
    rows = []
    for (label, name), series in points.items():
        (less, sooner), (more, later) = min(series), max(series)
        if later > sooner:
            read = (more - less) / (later - sooner)
            size = f"{(more - less) / 1e9:.2f} GB in {(later - sooner) * 1e6:.0f} us"
            rows.append([label, name, size, f"{read / 1e9:.0f}{_share(read, limits, 'copy')}"])
    if rows:
        yield "What attention reads more with the most slots than with the fewest, and how fast:"
        yield ""
        yield from table(["", "cache", "more", "GB/s"], rows)


def _prefill(values: Values, limits: _Limits) -> Iterator[str]:
    rows = []
    for label, engines in values.items():
        if "flops" not in engines.get(OURS, {}):
            continue
        n = int(label.split()[-2])
        seconds = {name: engines[name]["seconds"] for name in ("full", "h2o")}
        first = median(seconds["full"])
        rate = engines[OURS]["flops"][-1] / first
        row = [label, *(cell([n / value for value in found]) for found in seconds.values())]
        rows.append([*row, f"{first * 1e3:.1f}", f"{rate / 1e12:.0f}{_share(rate, limits, 'f16')}"])
    yield "A prompt in one piece; tokens/s, by what is then kept of it:"
    yield ""
    yield from table(["", "full", "h2o", "first token, ms", "TFLOP/s"], rows)
    yield (
        "First token: until the host has it, with a loaded model. TFLOP/s: of the products of the"
        " layers and of causal attention. Both with the full cache."
    )
    yield ""


def _share(rate: float, limits: _Limits, limit: str) -> str:
    return f" ({rate / limits[limit]:.0%})" if limit in limits else ""
