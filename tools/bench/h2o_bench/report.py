"""The report of a comparison."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from h2o_bench.engine_names import OURS
from h2o_bench.records import Record

# Values of a section by model, engine and measure.
Values = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]


def values_of(records: Iterable[Record], section: int) -> Values:
    """The values of a section, records concatenated."""
    found: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for record in records:
        if record.section == section and record.values:
            found[record.model][record.engine][record.measure].extend(record.values)
    return found


def render(records: Sequence[Record], plot: str | None = None) -> str:
    """Markdown: the machine, and the sections with records.

    plot: the file name of the figure of section 2.
    """
    lines = ["# Performance", "", *_machine(records), *_versions(records)]
    lines += [
        "Engines take turns on the same cores and threads, each in its own process; token counts"
        " are checked. Weights are random, in real shapes (`tools/bench/synthetic`). Cells: median"
        f" (slowest to fastest round). **Factors**: {OURS}'s median over this engine's.",
        "",
    ]
    sections = (
        ("1. Prefill and decode", _speed),
        ("2. Speed and memory against context", _contexts),
        ("3. What scores cost", _machinery),
        ("4. Start", _start),
    )
    for number, (title, section) in enumerate(sections, start=1):
        if any(record.section == number for record in records):
            lines += [f"## {title}", ""]
            if number == 2 and plot is not None:
                lines += [f"![tokens per second and memory against context]({plot})", ""]
            lines += [*section(values_of(records, number)), *not_measured(records, number)]
    lines += commands(records)
    return "\n".join(lines).rstrip() + "\n"


def commands(records: Sequence[Record]) -> Iterator[str]:
    """The commands to reproduce the measurements."""
    notes = dict.fromkeys(record.note for record in records if record.measure == "command")
    if notes:
        yield from ("## Measured by", "", "```sh", *notes, "```", "")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table and an empty line."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)] + [""]


def _machine(records: Sequence[Record]) -> Iterator[str]:
    for name, engines in values_of(records, 0).items():
        ours = {measure: values[-1] for measure, values in engines[OURS].items()}
        if "processors" not in ours:  # only a section was measured, not the machine
            continue
        bandwidths = [f"{value / 1e9:.1f}" for value in engines[OURS].get("read bandwidth", ())]
        read = f" Read bandwidth before each part: {', '.join(bandwidths)} GB/s."
        yield (
            f"{name}, {ours['processors']:.0f} processors, {ours['threads']:.0f} threads."
            f"{read if bandwidths else ''} The fastest matrix products of 2048 x 2048:"
        )
        yield ""
        peaks = [
            [library, type_name, f"{values[-1] / 1e9:.0f}"]
            for library, measures in engines.items()
            if library != OURS
            for type_name, values in measures.items()
        ]
        yield from table(["library", "type", "10^9 operations/s"], peaks)


def _versions(records: Sequence[Record]) -> Iterator[str]:
    starts = [
        r for r in records if r.measure == "start" and r.section != 3
    ]  # policies are included
    versions = {f"{r.engine.partition(',')[0]} {r.note}" for r in starts}
    if versions:
        yield f"{'; '.join(sorted(versions))}."
        yield ""


def _speed(values: Values) -> Iterator[str]:
    measures = dict.fromkeys(
        measure
        for engines in values.values()
        for measure in engines[OURS]
        if measure.startswith(("prefill", "decode")) and not measure.endswith("rss")
    )
    baselines = dict.fromkeys(
        name for engines in values.values() for name in engines if name != OURS
    )
    for measure in sorted(measures, key=lambda name: (name[0] == "d", int(name.split()[1]))):
        kind, n = measure.split()
        yield f"{kind.capitalize()}, tokens/s, " + (
            f"{n} tokens:" if kind == "prefill" else f"after {n} tokens:"
        )
        yield ""
        rows = []
        for model, engines in values.items():
            ours = engines[OURS].get(measure, [])
            limit = _use(engines[OURS], kind, ours)
            row = [model, cell(ours), limit]
            rows.append(row + [cell(engines[p].get(measure, []), ours) for p in baselines])
        unit = "GFLOP/s" if kind == "prefill" else "GB/s"
        yield from table(["model", OURS, unit, *baselines], rows)
    yield (
        "GB/s: weights and cache read per token, times tokens per second; in percent of what the"
        " same threads read from a large array. GFLOP/s: matrix products of the layers."
    )
    yield ""


def _use(ours: Mapping[str, Sequence[float]], kind: str, rates: Sequence[float]) -> str:
    """Computation or reading per second."""
    if not rates:
        return ""
    if kind == "prefill":
        return f"{median(rates) * ours['flops per token'][-1] / 1e9:.0f}"
    read = median(rates) * ours["bytes per token"][-1]
    return f"{read / 1e9:.1f} ({read / ours['read bandwidth'][-1]:.0%})"


def _contexts(values: Values) -> Iterator[str]:
    for model, engines in values.items():
        contexts = sorted(
            {int(m.split()[1]) for e in engines.values() for m in e if m.startswith("decode")}
        )
        base = engines.get("llama.cpp", {})
        for title, suffix in (("tokens/s", ""), ("MiB resident, at most", " rss")):
            yield f"{model}: {title} by context length:"
            yield ""
            rows = []
            for name, measures in engines.items():
                cells = [name]
                for context in contexts:
                    found = measures.get(f"decode {context}{suffix}", [])
                    if suffix:
                        cells.append(f"{max(found) / 2**20:.0f}" if found else "")
                    else:
                        theirs = base.get(f"decode {context}", [])
                        cells.append(cell(found, theirs, of_theirs=True))
                rows.append(cells)
            yield from table(["cache", *map(str, contexts)], rows)
    yield (
        "Here a factor is the median over llama.cpp's at the same context. Memory is that of the"
        " process, with the interpreter and this package's imports."
    )
    yield ""


def _machinery(values: Values) -> Iterator[str]:
    rows = []
    for model, engines in values.items():
        for measure in ("attend seconds", "decode"):
            window, h2o = (
                [v for m, vs in engines[name].items() if m.startswith(measure) and "rss" not in m
                 for v in vs]
                for name in ("window", "h2o")
            )  # fmt: skip
            if not window or not h2o:
                continue
            if measure == "decode":  # tokens per second
                window, h2o = ([1 / value for value in rates] for rates in (window, h2o))
            cells = [microseconds(window), microseconds(h2o)]
            rows.append([model, *cells, f"{median(h2o) / median(window) - 1:+.1%}"])
    yield "Microseconds per step with a full cache: median (quartiles)."
    yield ""
    yield from table(["", "window", "h2o", "h2o takes"], rows)


def microseconds(seconds: Sequence[float]) -> str:
    """Median and quartiles."""
    low, high = _quartiles(seconds)
    return f"{median(seconds) * 1e6:.0f} ({low * 1e6:.0f} to {high * 1e6:.0f})"


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]


def _start(values: Values) -> Iterator[str]:
    for model, engines in values.items():
        if model == "wheel":
            size = engines[OURS]["bytes"][-1]
            yield f"The wheel has {size / 2**20:.2f} MiB."
            yield ""
            continue
        rows = []
        for name, measures in engines.items():
            prompt = [
                int(measure.split()[1]) / rate
                for measure, rates in measures.items()
                if measure.startswith("prefill") and not measure.endswith("rss")
                for rate in rates
            ]
            parts = [measures[key] for key in ("import_seconds", "load_seconds")] + [prompt]
            first = f"{sum(map(median, parts)):.3f}" if all(parts) else ""
            rows.append([name, *map(_seconds, parts), first])
        yield f"{model}, seconds:"
        yield ""
        head = ["", "import", "load", "prompt", "first token"]
        yield from table(head, rows)
        yield "The first token comes after all three; files are in the page cache."
        yield ""


def _seconds(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def cell(
    rates: Sequence[float], other: Sequence[float] | None = None, *, of_theirs: bool = False
) -> str:
    """Median and spread; with `other`, also the ratio of the medians."""
    if not rates:
        return ""
    text = _digits(median(rates))
    if len(rates) > 1:
        text += f" ({_digits(min(rates))} to {_digits(max(rates))})"
    if not other:
        return text
    factor = median(other) / median(rates)
    return f"{text} **{1 / factor if of_theirs else factor:.2f}x**"


def _digits(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def not_measured(records: Sequence[Record], section: int) -> Iterator[str]:
    """The engines that were not measured, with reasons."""
    absent = [r for r in records if r.section == section and r.measure == "absent"]
    if absent:
        yield "Not measured:"
        yield ""
        reasons: dict[tuple[str, str], list[str]] = {}
        for record in absent:
            models = reasons.setdefault((record.engine, record.note), [])
            if record.model not in models:
                models.append(record.model)
        engines: dict[tuple[str, str], list[str]] = {}
        for (engine, reason), models in reasons.items():
            engines.setdefault((", ".join(models), reason), []).append(engine)
        for (where, reason), names in engines.items():
            yield f"- {', '.join(names)} on {where}: {reason}"
        yield ""
