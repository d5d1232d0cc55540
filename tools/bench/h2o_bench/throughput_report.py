"""The page that tells what tools/bench/throughput has measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import numpy as np

from h2o_bench.baselines import OURS
from h2o_bench.records import Record
from h2o_bench.report import Values, cell, not_measured, table, values_of
from h2o_bench.throughput import ARRIVALS, OFFLOAD, SEQUENCES, SHARE, TABLE

_FULL, _H2O = f"{OURS}, full", f"{OURS}, hh={SHARE}"


def render_throughput(records: Sequence[Record], raw: str) -> str:
    """Markdown of all sections there are records of; raw: the name of the file of records."""
    lines = ["# Throughput", ""]
    for command in dict.fromkeys(r.note for r in records if r.measure == "command"):
        lines += [f"`{command}`", ""]
    for name, engines in values_of(records, 0).items():
        threads = engines[OURS]["threads"][-1]
        lines += [f"{name}, {threads:.0f} threads. Raw numbers: [{raw}]({raw}).", ""]
    versions = {f"{r.engine}: {r.note}" for r in records if r.measure == "sequences" and r.note}
    lines += [f"- {one}" for one in sorted(versions)] + [""]
    sections = (
        (TABLE, "Equal memory", _TABLE_TEXT, _cells),
        (OFFLOAD, "Less memory than the weights take", _OFFLOAD_TEXT, _cells),
        (SEQUENCES, "Tokens per second against sequences", _SEQUENCES_TEXT, _sequences),
        (ARRIVALS, "Requests that arrive at random", _ARRIVALS_TEXT, _arrivals),
    )
    for i, (section, title, text, body) in enumerate(sections, start=1):
        if any(record.section == section for record in records):
            lines += [f"## {i}. {title}", "", text, ""]
            lines += [*body(values_of(records, section)), *not_measured(records, section)]
    return "\n".join(lines).rstrip() + "\n"


_TABLE_TEXT = (
    "The paper's experiment: every text has a prompt of random tokens and is continued, by the"
    " likeliest token, to the same length. Each engine continues as many texts together as have"
    " their caches beside its weights in the same memory, as computed from its types. Tokens per"
    " second are those generated, by the time of prompts and generation together. Engines take"
    " turns, each in a process of its own, and the number of tokens is checked. Resident is the"
    " peak of the process with its libraries and activations, and before its texts began. Weights"
    " are random, in real shapes."
)
_OFFLOAD_TEXT = (
    "h2o.cpp with the least `max_resident`, Accelerate with all weights on disk: both read them"
    " again in every pass. The system has the files in its memory."
)
_SEQUENCES_TEXT = "Decoding, prompts not counted. Memory ends at the number in the last row."
_ARRIVALS_TEXT = (
    "A Poisson process; prompts of 16 to 512 tokens, continued by 16 to 256, their logarithms"
    " spread evenly. Static batching begins those that wait together and lets nobody in until all"
    " of them have ended; continuous is the Engine, each request an asyncio task. The rate is that"
    " at which the full cache's Engine is busy for 70 % of the time, in the memory of the first"
    " table. Times are what those who ask see."
)


def _cells(values: Values) -> Iterator[str]:
    for case, engines in values.items():
        memory = engines[""]["memory"][-1]
        yield f"{case} tokens, {memory / 2**20:.0f} MiB for weights and caches:"
        yield ""
        ours = engines.get(_H2O, {}).get("tokens/s")
        rows = []
        for name, found in engines.items():
            if rates := found.get("tokens/s"):
                sizes = (max(found[key]) / 2**20 for key in ("computed bytes", "rss", "before"))
                computed, rss, before = (f"{size:.0f}" for size in sizes)
                n = f"{found['sequences'][-1]:.0f}"
                rate = cell(rates, None if name == _H2O else ours)
                rows.append([name, n, rate, computed, rss, before])
        head = ["", "texts", "tokens/s", "computed MiB", "resident MiB", "before"]
        yield from table(head, rows)
    yield f"A factor is the rate of {_H2O} divided by this one's."
    yield ""


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
