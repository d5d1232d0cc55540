"""Tables of the GPU report: every shape, a long text, the paper's experiment, other engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from h2o_bench.engine_names import OURS
from h2o_bench.report import Values, cell, table

Limits = Mapping[str, float]  # "copy" and "f16", per second, if measured
_Measures = Mapping[str, Sequence[float]]

_STEP = "step seconds"
_ACCELERATE = "Accelerate offload"

# Tokens per second, with the batch; G: weights in the GPU's memory, C: in the CPU's.
_PAPER_T4 = (
    ("Accelerate", "20.4 (2, G)", "0.6 (8, C)", "15.5 (1, G)", "0.6 (8, C)", "5.6 (16, C)",
     "0.6 (8, C)"),
    ("DeepSpeed", "10.2 (16, C)", "0.6 (4, C)", "9.6 (16, C)", "0.6 (4, C)", "10.1 (16, C)",
     "0.6 (4, C)"),
    ("FlexGen", "20.2 (2, G)", "8.1 (144, C)", "16.8 (1, G)", "8.5 (80, C)", "16.9 (1, G)",
     "7.1 (48, C)"),
    ("H2O (20%)", "35.1 (4, G)", "12.7 (728, C)", "51.7 (4, G)", "18.83 (416, C)", "52.1 (4, G)",
     "13.82 (264, C)"),
)  # fmt: skip
_PAPER_A100 = (
    ("OPT-30B, 7000 + 1024, batch 1", "57.0 s", "50.4 s"),
    ("OPT-6.7B, 2048 + 2048, batch 24", "99.5 s, 494.1 tokens/s", "53.5 s, 918.9 tokens/s"),
    ("OPT-6.7B, 2048 + 2048, batch 64", "out of memory", "1161.0 tokens/s"),
)


def grid(values: Values, limits: Limits) -> Iterator[str]:
    """Decode of one and many sequences, by context and cache."""
    # Everything, a number of slots, a share.
    caches = sorted({name for engines in values.values() for name in engines},
                    key=lambda name: (name != "full", name.startswith("hh"), name))  # fmt: skip
    rows = []
    for label, engines in values.items():
        found = {name: engines[name] for name in caches if _STEP in engines.get(name, {})}
        if not found:
            continue
        name, batch, context = _parts(label)
        steps = [_milliseconds(found.get(cache)) for cache in caches]
        rates = [_rate(found.get(cache), batch) for cache in caches]
        sizes = [_gibibytes(found.get(cache), "cache bytes") for cache in caches]
        bandwidths = [_bandwidth(found.get(cache), limits) for cache in caches]
        row = [name, batch, context, *(" / ".join(x) for x in (steps, rates, bandwidths, sizes))]
        rows.append([*row, _gibibytes(found.get("full"), "device bytes")])
    yield f"Cells are {' / '.join(caches)}; ms: the median step; device: with the full cache."
    yield ""
    head = ["model", "sequences", "after", "ms", "tokens/s", "GB/s", "cache GiB", "device GiB"]
    yield from table(head, rows)
    yield (
        "GB/s: weights and cache that a step reads, once, over the median step; of the copy"
        " bandwidth. hh: a share of the context. -: not measured, or the full cache."
    )
    yield ""


def long_text(values: Values, limits: Limits) -> Iterator[str]:
    """Decode along one text."""
    rows = []
    first: dict[str, float] = {}
    for label, engines in values.items():
        name, _, after = label.partition(", after ")
        for engine, measures in engines.items():
            if _STEP not in measures:
                continue
            step = median(measures[_STEP])
            times = first.setdefault(f"{name} {engine}", step) / step
            row = [name, engine, after, f"{step * 1e3:.3f}", f"{1 / step:.0f}", f"{times:.3f}"]
            rows.append([*row, _bandwidth(measures, limits)])
    head = ["model", "cache", "after", "ms", "tokens/s", "of the first", "GB/s"]
    yield from table(head, rows)


def paper(values: Values, limits: Limits) -> Iterator[str]:
    """Generation by batch, beside transformers and Accelerate."""
    rates = {
        (label, name): _generated(label, measures)
        for label, engines in values.items()
        for name, measures in engines.items()
        if "tokens" in measures
    }
    rows = []
    for label, engines in values.items():
        case, _, batch = label.rpartition(", batch ")
        for name, measures in engines.items():
            if (label, name) not in rates:
                continue
            prefill = measures["prefill seconds"][-1]
            decode = measures["decode seconds, extrapolated"][-1]
            step = decode / max(1.0, measures["tokens"][-1] - 1)
            row = [case, batch, name, f"{prefill + decode:.2f}", f"{prefill:.2f}"]
            row += [f"{step * 1e3:.2f}", f"{rates[label, name]:.1f}"]
            row += [_gibibytes(measures, "cache bytes"), _memory(measures)]
            rows.append([*row, _compared(rates, case, label, name, measures)])
    head = ["", "batch", "cache or engine", "seconds", "prompts", "ms per step", "tokens/s"]
    yield from table([*head, "cache GiB", "device GiB", "compared"], rows)
    yield (
        "Prompt + generated tokens of each sequence. tokens/s: those generated, over the whole"
        " time, as in the paper; decoding is computed from the median steps at the beginning, in"
        " the middle and at the end (of a bounded cache that is full: at the beginning). Offloaded:"
        " all layers are copied from host memory in every step. Device: memory in use; of"
        " transformers, by its tensors."
    )
    yield ""


def paper_rows() -> Iterator[str]:
    """What the paper reports, and what differs."""
    yield (
        "The paper's rows (arXiv 2306.14048, tables 3 and 5). Tokens/s on a T4 of 16 GB, with the"
        " batch; G: weights and cache in the GPU's memory, C: offloaded to the CPU's:"
    )
    yield ""
    lengths = [f"{n}: {size}" for n in ("512 + 32", "512 + 512", "512 + 1024")
               for size in ("6.7B", "30B")]  # fmt: skip
    yield from table(["", *lengths], _PAPER_T4)
    yield "On an A100 of 80 GB:"
    yield ""
    yield from table(["", "FlexGen", "H2O (20%)"], _PAPER_A100)
    yield (
        "What differs: the card; the paper's cache and, where it says C, weights are in host"
        " memory, ours only if offloaded; FlexGen schedules blocks of batches. The paper's largest"
        " factors (29x, 3x) are not at equal batch. DeepSpeed and FlexGen were not run."
    )
    yield ""


def peers(values: Values, limits: Limits) -> Iterator[str]:
    """Decode and prefill beside other engines, with factors."""
    full = f"{OURS}, full"
    engines = list(dict.fromkeys(name for found in values.values() for name in found))
    others = [name for name in engines if not name.startswith(OURS)]
    bounded = [name for name in engines if name.startswith(OURS) and name != full]
    decode, prompts = [], []
    for label, found in values.items():
        if any(_STEP in measures for measures in found.values()):
            name, batch, context = _parts(label)
            rates = {e: [int(batch) / median(m[_STEP])] for e, m in found.items() if _STEP in m}
            ours = rates.get(full, [])
            row = [name, batch, context, *(cell(rates.get(e, [])) for e in (full, *bounded))]
            decode.append([*row, *(cell(rates.get(e, []), ours) for e in others)])
        elif any("seconds" in measures for measures in found.values()):
            n = int(label.split()[-2])
            rates = {e: [n / s for s in m.get("seconds", [])] for e, m in found.items()}
            ours = rates.get(full, [])
            row = [label, cell(ours), *(cell(rates.get(e, []), ours) for e in others)]
            prompts.append(row)
    if decode:
        yield "Decode, tokens/s of all sequences:"
        yield ""
        yield from table(["model", "sequences", "after", full, *bounded, *others], decode)
    if prompts:
        yield "Prefill, tokens/s:"
        yield ""
        yield from table(["", full, *others], prompts)
    yield (
        f"**Factors**: {OURS} with the full cache over the engine. llama.cpp: llama-bench and"
        " llama-batched-bench with the same files, flash attention, the faster of 512 and 2048"
        " tokens per pass; it chooses no tokens, all others the most likely one, which the host"
        " waits for. transformers computes in f16."
    )
    yield ""


def _compared(
    rates: Mapping[tuple[str, str], float], case: str, label: str, name: str, measures: _Measures
) -> str:
    """Of H2O: times the full cache; of another engine: how many times as fast H2O is."""
    rate = rates[label, name]
    if name == "full":
        return ""
    if name.startswith("hh"):
        found = []
        if (label, "full") in rates:
            found.append(f"{rate / rates[label, 'full']:.2f}x full")
        for other in measures.get("equal to", []):
            at = f"{case}, batch {other:.0f}"
            if (at, "full") in rates:
                found.append(f"{rate / rates[at, 'full']:.2f}x full at batch {other:.0f}")
        return ", ".join(found)
    found = []
    resident = case.replace(", offloaded", "")
    for (at, engine), ours in rates.items():
        at_case, _, batch = at.rpartition(", batch ")
        if not engine.startswith("hh") or not (at == label or name == _ACCELERATE):
            continue
        if at_case in (case, resident):
            where = "" if at_case == case else " in device memory"
            found.append(f"{engine} at batch {batch}{where}: {ours / rate:.1f}x")
    return ", ".join(found)


def _generated(label: str, measures: _Measures) -> float:
    """Tokens per second."""
    batch = int(label.rpartition(", batch ")[2])
    seconds = measures["prefill seconds"][-1] + measures["decode seconds, extrapolated"][-1]
    return batch * measures["tokens"][-1] / seconds


def _parts(label: str) -> tuple[str, str, str]:
    """Model, batch and context."""
    head, _, context = label.rpartition(", after ")
    name, _, batch = head.rpartition(", batch ")
    return name, batch, context


def _milliseconds(measures: _Measures | None) -> str:
    return f"{median(measures[_STEP]) * 1e3:.3f}" if measures else "-"


def _rate(measures: _Measures | None, batch: str) -> str:
    return f"{int(batch) / median(measures[_STEP]):.0f}" if measures else "-"


def _bandwidth(measures: _Measures | None, limits: Limits) -> str:
    if not measures or "bytes per step" not in measures:
        return "-"
    rate = measures["bytes per step"][-1] / median(measures[_STEP])
    share = f" ({rate / limits['copy']:.0%})" if "copy" in limits else ""
    return f"{rate / 1e9:.0f}{share}"


def _memory(measures: _Measures) -> str:
    return _gibibytes(measures, "device bytes") if "device bytes" in measures else ""


def _gibibytes(measures: _Measures | None, measure: str) -> str:
    return f"{measures[measure][-1] / 2**30:.2f}" if measures and measure in measures else "-"
