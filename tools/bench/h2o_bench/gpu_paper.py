"""The paper's experiment (arXiv 2306.14048): generation by H2O and by the full cache."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median

from h2o_bench.gpu import Bench
from h2o_bench.gpu_plan import Generation, Paper
from h2o_bench.gpu_sections import MACHINE
from h2o_bench.texts import Texts
from h2o_cpp import _core
from h2o_cpp.measure.planner import sizes_of
from h2o_cpp.measure.prediction import placements
from h2o_cpp.model.cache_memory import capacity
from h2o_cpp.model.policy import Policy, budget_policy

_SECONDS = 10.0  # that a batch needs
_ROOM = 1.02  # weights on the device are padded


def least_resident(path: Path) -> int:
    """The smallest max_resident of a model."""
    model = _core.GgufShards(path)
    sizes = sizes_of(model, _core.Config(model))
    return int(_ROOM * min(n_bytes for _, n_bytes in placements(sizes))) + (1 << 20)


def measure_model(bench: Bench, section: int, paper: Paper, path: Path) -> None:
    """All generations of a model; those offloaded keep as few weights on the device as possible."""
    name = f"{paper.shape} {paper.type_name}{', offloaded' if paper.offload else ''}"
    with bench.measuring(section, name, "all"):
        resident = least_resident(path) if paper.offload else 0
        model = bench.load(paper.shape, paper.type_name, path, resident)
        bench.record(MACHINE, name, "weights", "offloaded bytes", model.streamed_bytes)
        n = min(2048, bench.plan.n_positions)
        Texts(model, Policy.full(), n_ctx=n, n_batch=n).read(n)  # warm-up
        for generation in paper.generations:
            _measure(bench, section, model, name, generation, paper.offload)


def _measure(
    bench: Bench, section: int, model: _core.Model, name: str, of: Generation, offload: bool
) -> None:
    """Both caches at the same batches; then as many bounded ones as take the same memory."""
    share = bench.plan.share
    n_ctx = of.prompt + of.generated
    bounded = budget_policy(share, None, n_ctx)
    full_bytes: dict[int, int] = {}
    run = partial(_generate, bench, section, model, name, of, offload=offload)
    for batch in sorted({*of.batches, *of.equal_to}):
        full_bytes[batch] = run(batch, "full", Policy.full())
        if batch in of.batches:
            run(batch, f"hh={share}", bounded)
    for equal_to in of.equal_to:
        if full_bytes[equal_to]:
            batch = capacity(model.file.path, full_bytes[equal_to], policy=bounded, n_ctx=n_ctx)
            if run(batch, f"hh={share}", bounded):
                label = label_of(name, of.prompt, of.generated, batch)
                bench.record(section, label, f"hh={share}", "equal to", equal_to)


def label_of(name: str, prompt: int, generated: int, batch: int) -> str:
    return f"{name}, {prompt} + {generated}, batch {batch}"


def _generate(
    bench: Bench,
    section: int,
    model: _core.Model,
    name: str,
    of: Generation,
    batch: int,
    cache: str,
    policy: Policy,
    *,
    offload: bool,
) -> int:
    """Returns the cache's bytes, 0 if it was not measured."""
    label = label_of(name, of.prompt, of.generated, batch)
    if not bench.has_time(section, label, cache, _SECONDS):
        return 0
    with bench.measuring(section, label, cache):
        return _timed(bench, section, model, label, of, batch, cache, policy, offload)
    return 0


def _timed(
    bench: Bench,
    section: int,
    model: _core.Model,
    label: str,
    of: Generation,
    batch: int,
    cache: str,
    policy: Policy,
    offload: bool,
) -> int:
    plan = bench.plan
    at_once = plan.n_batch if offload else plan.read_together
    together = max(1, min(batch, at_once // of.prompt))
    texts = Texts(
        model,
        policy,
        n_ctx=of.prompt + of.generated,
        n_batch=max(together * of.prompt, at_once if together == 1 else 0),
        n_sequences=batch,
    )
    n_warm = 1 if offload else plan.n_warm
    texts.read(1)
    texts.decode(n_warm)
    texts.reset()
    record = partial(bench.record, section, label, cache)
    most = min(bench.left(), 4 * plan.most_seconds if offload else 2 * plan.most_seconds)
    prefill = texts.read(of.prompt, together=together, most=most)
    n = of.generated - 1  # the first comes with the prompt
    samples = {}
    for first in firsts(of, n, plan.n_offloaded if offload else plan.n_paper, policy.budget):
        seen = texts.session.tokens_seen(0) - of.prompt
        if first > seen:
            texts.read(first - seen, together=together, most=most)
        n_steps = min(n - first, plan.n_offloaded if offload else plan.n_paper)
        samples[first] = texts.decode(n_steps)
    seen = texts.session.tokens_seen(0)
    texts.check(seen)
    record("prefill seconds", prefill)
    for first, seconds in samples.items():
        record(f"step seconds at {of.prompt + first}", *seconds)
    # The time of a step is linear in the length, or constant.
    mean = sum(map(median, samples.values())) / len(samples)
    record("decode seconds, extrapolated", n * mean)
    record("prompt", of.prompt)
    record("tokens", of.generated)
    bench.record_memory(section, label, cache, texts)
    return texts.session.cache_bytes


def firsts(of: Generation, n: int, n_sample: int, budget: int | None) -> list[int]:
    """Steps at which samples begin: at the beginning, in the middle and at the end.

    A cache that is full after the prompt is as large in every step, so its first steps suffice.
    """
    if budget is not None and budget <= of.prompt:
        return [0]
    if n <= 3 * n_sample:
        return list(range(0, n, n_sample))
    return [0, (n - n_sample) // 2, n - n_sample]
