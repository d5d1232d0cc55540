"""The report of tools/bench/throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import numpy as np

from h2o_bench.engine_names import OURS
from h2o_bench.records import Record
from h2o_bench.report import Values, cell, commands, not_measured, table, values_of
from h2o_bench.throughput import ARRIVALS, OFFLOAD, SEQUENCES, SHARE, TABLE

_FULL, _H2O = f"{OURS}, full", f"{OURS}, hh={SHARE}"


def render_throughput(records: Sequence[Record]) -> str:
    """Markdown of all sections with records, below the findings of a page."""
    lines: list[str] = []
    for name, engines in values_of(records, 0).items():
        threads = engines[OURS]["threads"][-1]
        lines += [f"{name}, {threads:.0f} threads.", ""]
    versions = {
        f"{record.engine.partition(', ')[0]} {record.note}"
        for record in records
        if record.measure == "sequences" and record.note
    }
    lines += ["; ".join(sorted(versions)) + ".", ""] if versions else []
    sections = (
        (TABLE, "Equal memory", _TABLE_TEXT, _cells),
        (OFFLOAD, "Less memory than the weights take", _OFFLOAD_TEXT, _cells),
        (SEQUENCES, "Tokens per second against sequences", _SEQUENCES_TEXT, _sequences),
        (ARRIVALS, "Requests that arrive at random", _ARRIVALS_TEXT, _arrivals),
    )
    for section, title, text, body in sections:
        if any(record.section == section for record in records):
            lines += [f"## {title}", "", text, ""]
            lines += [
                *body(values_of(records, section)),
                *not_measured(_shortest(records), section),
            ]
    lines += commands(records)
    return "\n".join(lines).rstrip() + "\n"


_TABLE_TEXT = (
    "Random weights in real shapes, random prompts, greedy outputs of a fixed length. Each engine"
    " runs as many sequences as fit beside its weights in the same memory. Tokens/s: generated"
    " tokens divided by the time of prefill and decode. Resident: peak of the process."
    f" **Bold**: tokens/s of {_H2O} divided by this engine's."
)
_OFFLOAD_TEXT = (
    "h2o.cpp with the smallest `max_resident`, Accelerate with all weights on disk: both read the"
    " weights again in every pass, from the page cache."
)
_SEQUENCES_TEXT = (
    "Decode only. The last row: how many sequences fit in the memory of the first table."
)
_ARRIVALS_TEXT = (
    "A Poisson process; prompts of 16 to 512 tokens, outputs of 16 to 256, in the memory of the"
    " first table. Static: waiting requests start together and others wait; continuous: the Engine,"
    " busy for 70% of the time with the full cache. Times are the client's."
)


def _shortest(records: Sequence[Record]) -> list[Record]:
    """The records; of absent engines only the first case of each model."""
    seen: set[tuple[int, str, str]] = set()
    kept = []
    for record in records:
        key = (record.section, _model(record.model)[0], record.engine)
        if record.measure != "absent" or key not in seen:
            kept.append(record)
        if record.measure == "absent":
            seen.add(key)
    return kept


def _model(case: str) -> tuple[str, str]:
    """A model and its lengths, from "OPT-125M, 512 + 32"."""
    model, _, lengths = case.partition(", ")
    return model, lengths


def _cells(values: Values) -> Iterator[str]:
    models = dict.fromkeys(_model(case)[0] for case in values)
    for model in models:
        cases = {
            _model(case)[1]: found for case, found in values.items() if _model(case)[0] == model
        }
        memory = max(found[""]["memory"][-1] for found in cases.values())
        head = [f"{model} in {memory / 2**20:.0f} MiB"]
        for lengths in cases:
            head += [f"{lengths}: sequences", "tokens/s"]
        rows = []
        for name in dict.fromkeys(name for found in cases.values() for name in found):
            row, sizes = [name], [0.0]
            for found in cases.values():
                measured = found.get(name, {})
                ours = None if name == _H2O else found.get(_H2O, {}).get("tokens/s")
                rates = measured.get("tokens/s", [])
                row += [f"{measured['sequences'][-1]:.0f}" if rates else "", cell(rates, ours)]
                sizes += measured.get("rss", []) if rates else []
            if any(row[1:]):
                rows.append([*row, f"{max(sizes) / 2**20:.0f}"])
        yield from table([*head, "resident MiB"], rows)


def _sequences(values: Values) -> Iterator[str]:
    for case, engines in values.items():
        memory = engines[""]["memory"][-1]
        context = engines[""]["context"][-1]
        yield f"{case}, n_ctx {context:.0f}:"
        yield ""
        counts = sorted(int(key) for key in engines[_FULL] if key.isdecimal())
        rows = []
        for k in counts:
            full, h2o = (engines[name].get(f"{k}", []) for name in (_FULL, _H2O))
            caches = [engines[name][f"{k} bytes"][-1] / 2**20 for name in (_FULL, _H2O)]
            rows.append([f"{k}", cell(full), f"{caches[0]:.0f}", cell(h2o), f"{caches[1]:.0f}"])
        fits = [f"{engines[name]['fit'][-1]:.0f} sequences" for name in (_FULL, _H2O)]
        rows.append([f"in {memory / 2**20:.0f} MiB", fits[0], "", fits[1], ""])
        yield from table(["sequences", _FULL, "MiB of caches", _H2O, "MiB of caches"], rows)


def _arrivals(values: Values) -> Iterator[str]:
    for shape, engines in values.items():
        yield f"{shape}, {engines['']['requests/s'][-1]:.2f} requests/s:"
        yield ""
        rows = [_arrival(name, found) for name, found in engines.items() if name]
        head = ["", "sequences", "tokens/s", "first token, p50", "p99", "between tokens, p50"]
        yield from table([*head, "p99"], rows)


def _arrival(name: str, found: Mapping[str, Sequence[float]]) -> list[str]:
    first = np.quantile(found["seconds to the first token"], [0.5, 0.99])
    gaps = found["seconds between tokens, p50 and p99"]
    times = [f"{seconds:.2f} s" for seconds in first]
    times += [f"{1e3 * median(gaps[i::2]):.1f} ms" for i in (0, 1)]
    return [name, f"{found['sequences'][-1]:.0f}", f"{median(found['tokens/s']):.0f}", *times]
