"""The GPU part of the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from h2o_bench.baselines import OURS
from h2o_bench.gpu_sections import (
    DECODE,
    EVICTION,
    GRID,
    LARGE,
    LONG,
    MACHINE,
    PAPER,
    PEERS,
    PREFILL,
    SCORES,
)  # fmt: skip
from h2o_bench.gpu_tables import grid, long_text, paper, paper_rows, peers
from h2o_bench.records import Record
from h2o_bench.report import Values, cell, microseconds, not_measured, table, values_of

_Limits = Mapping[str, float]  # "copy" and "f16", per second, if measured
_Measures = Mapping[str, Sequence[float]]


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
        if "torch" not in engines:
            continue
        limits = {measure: values[-1] for measure, values in engines["torch"].items()}
        lines += [f"{name}.", "", *_machine(limits)]
    lines += [*not_measured(records, MACHINE)]
    rows_of_paper: Iterator[str] = paper_rows()  # once
    for number, title, section in (
        (DECODE, "1. Decode", _decode),
        (EVICTION, "2. H2O against the full cache", _eviction),
        (SCORES, "3. What scores cost", _scores),
        (PREFILL, "4. Prefill", _prefill),
        (GRID, "5. Decode by shape, context and batch", grid),
        (LONG, "6. A long text", long_text),
        (PAPER, "7. The paper's experiment", paper),
        (PEERS, "8. Other engines", peers),
        (LARGE, "9. The paper's experiment with a larger model", paper),
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


def _decode(values: Values, limits: _Limits) -> Iterator[str]:
    baselines = dict.fromkeys(e for engines in values.values() for e in engines if not _ours(e))
    rows = []
    for shape, engines in values.items():
        for name, measures in engines.items():
            rates = _starting(measures, "decode")
            if not _ours(name) or not rates:
                continue
            step = median(_starting(measures, "step seconds"))
            read = measures["bytes per token"][-1] / step
            row = [f"{shape} {name.removeprefix(OURS).strip()}", cell(rates), f"{step * 1e3:.3f}"]
            row.append(f"{read / 1e9:.0f}{_share(read, limits, 'copy')}")
            rows.append(
                row
                + [cell(_starting(engines[baseline], "decode"), rates) for baseline in baselines]
            )
    yield "One text; tokens/s of whole rounds: median, slowest and fastest. ms: the median step."
    yield ""
    yield from table(["model", OURS, "ms", "GB/s", *baselines], sorted(rows))
    yield (
        "GB/s: weights and cache that a step reads, once, over the median step. transformers"
        " computes in f16 beside every type, with PyTorch's scaled_dot_product_attention; its"
        " tokens/s come with what ours are divided by them. All feed given tokens and choose the"
        " most likely next one, which the host waits for."
    )
    yield ""


def _eviction(values: Values, limits: _Limits) -> Iterator[str]:
    rates: dict[tuple[str, str], float] = {}  # complete generations
    full = ""
    rows = []
    for label, engines in values.items():
        shape, _, batch = label.rpartition(", batch ")
        for name, measures in engines.items():
            whole = measures.get("decode seconds", [])
            extrapolated = measures.get("decode seconds, extrapolated", [])
            if not whole and not extrapolated:
                continue
            prefill, decode = measures["prefill seconds"][-1], (whole or extrapolated)[-1]
            n_tokens = int(batch) * measures["tokens"][-1]
            rate = rates[name, batch] = n_tokens / (prefill + decode)
            other = f"{measures['equal to'][-1]:.0f}" if "equal to" in measures else batch
            full = full or name
            factor = f"{rate / rates[full, other]:.2f}x" if (full, other) in rates else ""
            if other != batch:
                factor += f" batch {other}"
            memory = measures.get("device bytes")
            rows.append(
                [
                    batch,
                    name,
                    f"{prefill + decode:.2f}",
                    f"{prefill:.2f}",
                    f"{whole[-1]:.2f}" if whole else "",
                    f"{extrapolated[-1]:.2f}" if extrapolated else "",
                    f"{rate:.1f}",
                    f"{n_tokens / decode:.1f}",
                    _gibibytes(measures["cache bytes"][-1]),
                    "" if memory is None else _gibibytes(memory[-1]),
                    "" if name == full else factor,
                ]
            )
    prompt, generated = (
        next(m[key][-1] for e in values.values() for m in e.values() if key in m)
        for key in ("prompt", "tokens")
    )
    yield (
        f"{shape} F16, as many texts at once as `batch` says, each a prompt of {prompt:.0f} tokens"
        f" and then {generated:.0f} generated ones. tokens/s: those generated, over the whole time"
        " (as in the paper), and over the time of decoding. x full: whole tokens/s, over those of"
        " the full cache at the same batch, or at the batch that is named, whose cache has as much"
        " memory. GiB: of the cache, and of the device, weights and everything else included."
    )
    yield ""
    head = ["batch", "cache", "seconds", "prefill", "decode", "decode, extrapolated", "tokens/s"]
    yield from table([*head, "decode tokens/s", "cache GiB", "device GiB", f"x {full}"], rows)
    yield (
        "Extrapolated: from steps at the beginning, in the middle and at the end of the generated"
        " tokens, by their mean. Where not every token was decoded, that is the time that counts,"
        " and the text in between was read as a prompt is."
    )
    yield ""


def _scores(values: Values, limits: _Limits) -> Iterator[str]:
    rows = []
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}  # (bytes, seconds)
    for label, engines in values.items():
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
        names = ("full", "window", "h2o")
        seconds = {name: engines[name]["seconds"] for name in names if name in engines}
        first = median(seconds["full"])
        rate = engines[OURS]["flops"][-1] / first
        row = [label, *(cell([n / value for value in seconds.get(name, [])]) for name in names)]
        row += [f"{first * 1e3:.1f}", f"{rate / 1e12:.0f}{_share(rate, limits, 'f16')}"]
        cost = ""
        if "h2o" in seconds and "window" in seconds:
            cost = f"{median(seconds['h2o']) / median(seconds['window']) - 1:+.1%}"
        rows.append([*row, cost])
    yield "A prompt in one piece; tokens/s, by what is then kept of it:"
    yield ""
    head = ["", "full", "window", "h2o", "first token, ms", "TFLOP/s", "scores take"]
    yield from table(head, rows)
    yield (
        "First token: until the host has it, with the full cache and a loaded model. TFLOP/s: of"
        " the matrix products of the layers and of causal attention, with the full cache. Scores:"
        " h2o beside a window of as many slots, which sums no attention."
    )
    yield ""


def _ours(engine: str) -> bool:
    return engine.startswith(OURS)


def _starting(measures: _Measures, begin: str) -> list[float]:
    """The values of all measures with this prefix, except memory."""
    return [
        value
        for name, values in measures.items()
        if name.startswith(begin) and not name.endswith("rss")
        for value in values
    ]


def _share(rate: float, limits: _Limits, limit: str) -> str:
    return f" ({rate / limits[limit]:.0%})" if limit in limits else ""


def _gibibytes(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f}"
