"""Every shape and type: decode by context, batch and cache; prefill; a long text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from h2o_bench.gpu import Bench, measure_prefill, measure_scores
from h2o_bench.gpu_sections import GRID, LONG, PREFILL, SCORES
from h2o_bench.texts import Texts
from h2o_cpp import _core
from h2o_cpp.measure.traffic import decode_weight_bytes, kv_bytes, weights
from h2o_cpp.model.policy import Policy, budget_policy, fraction_of

_SECONDS = 5.0  # that a measurement needs


class Cell(NamedTuple):
    """Sequences of a context, and what is kept of each; 0 slots: everything."""

    batch: int
    context: int
    cache: str
    slots: int

    @property
    def policy(self) -> Policy:
        return budget_policy(self.slots or None, None, self.context)

    def kept(self, seen: float) -> float:
        """Tokens that one attends to, itself included."""
        return min(self.slots + 1, seen) if self.slots else seen


def cells(bench: Bench, batch: int, contexts: tuple[int, ...]) -> Iterator[Cell]:
    """Each context with all caches that differ."""
    plan = bench.plan
    for context in contexts:
        yield Cell(batch, context, "full", 0)
        if plan.fixed < context:
            yield Cell(batch, context, f"{plan.fixed} slots", plan.fixed)
        yield Cell(batch, context, f"hh={plan.share}", fraction_of(context, plan.share))


def measure_model(bench: Bench, shape: str, type_name: str) -> None:
    """All that is planned for a model of the grid."""
    plan = bench.plan
    (grid,) = (one for one in plan.grid if one[:2] == (shape, type_name))
    name = f"{shape} {type_name}"
    with bench.measuring(GRID, name, "all"):
        model = bench.model(shape, type_name)
        for cell in cells(bench, 1, tuple(grid.alone)):
            measure_cell(bench, GRID, model, name, cell)
        for n in plan.grid_prompts:
            label = f"{name}, {n} tokens"
            if bench.has_time(PREFILL, label, "full", _SECONDS):
                with bench.measuring(PREFILL, label, "full"):
                    measure_prefill(bench, model, label, n)
        if (shape, type_name) == plan.long_model:
            measure_long(bench)
        if (shape, type_name) == (plan.shape, "F16") and bench.has_time(SCORES, shape, "h2o", 20):
            with bench.measuring(SCORES, shape, "h2o"):
                measure_scores(bench)
        for cell in cells(bench, plan.together, tuple(grid.together)):
            measure_cell(bench, GRID, model, name, cell)


def measure_cell(
    bench: Bench, section: int, model: _core.Model, name: str, cell: Cell, prefix: str = ""
) -> None:
    """Decode greedily after a context; prefix: of the engine's name."""
    label = f"{name}, batch {cell.batch}, after {cell.context}"
    engine = prefix + cell.cache
    if bench.has_time(section, label, engine, _SECONDS):
        with bench.measuring(section, label, engine):
            _decode(bench, section, model, label, engine, cell)


def _decode(
    bench: Bench, section: int, model: _core.Model, label: str, engine: str, cell: Cell
) -> None:
    plan = bench.plan
    n = plan.n_warm + plan.n_timed
    texts = Texts(
        model,
        cell.policy,
        n_ctx=cell.context + n + 1,
        n_batch=min(plan.n_batch, cell.context),
        n_sequences=cell.batch,
    )
    texts.fill(cell.context, most=min(plan.most_seconds, bench.left()))
    texts.decode(plan.n_warm)
    seconds = texts.decode(plan.n_timed)
    texts.check(cell.context + n)
    bench.record(section, label, engine, "step seconds", *seconds)
    kept = cell.kept(cell.context + plan.n_warm + (plan.n_timed + 1) / 2)
    record_bytes(bench, section, model, label, engine, texts, cell.batch * kept)


def record_bytes(
    bench: Bench, section: int, model: _core.Model, label: str, engine: str, texts: Texts,
    kept: float,
) -> None:  # fmt: skip
    """Memory, and the bytes of weights and of so many kept tokens, which a step reads."""
    per_token = model.n_layers * kv_bytes(model.n_kv_heads, model.head_dim, "f16")
    read = decode_weight_bytes(weights([model.file])) + kept * per_token
    bench.record(section, label, engine, "bytes per step", read)
    bench.record_memory(section, label, engine, texts)


def measure_long(bench: Bench) -> None:
    """Decode along one long text with a fixed number of slots."""
    plan = bench.plan
    shape, type_name = plan.long_model
    name, engine = f"{shape} {type_name}", f"{plan.fixed} slots"
    if not bench.has_time(LONG, name, engine, 2 * _SECONDS):
        return
    with bench.measuring(LONG, name, engine):
        model = bench.model(shape, type_name)
        policy = Policy.h2o(plan.fixed // 2, plan.fixed - plan.fixed // 2)
        texts = Texts(model, policy, n_ctx=plan.n_long, n_batch=min(plan.n_batch, max(plan.long)))
        seen = 0
        for context in plan.long:
            texts.read(context - seen, most=bench.left())
            seen = context
            texts.decode(plan.n_warm)
            seconds = texts.decode(2 * plan.n_timed)
            seen += plan.n_warm + len(seconds)
            bench.record(LONG, f"{name}, after {context}", engine, "step seconds", *seconds)
            kept = min(plan.fixed + 1, seen)
            record_bytes(bench, LONG, model, f"{name}, after {context}", engine, texts, kept)
        texts.check(seen)
