"""llama.cpp and transformers beside ours: the same shapes, contexts and batches."""

from __future__ import annotations

from pathlib import Path

from h2o_bench.engine_names import LLAMA_CPP, OURS, TORCH
from h2o_bench.engine_process import EngineError, EngineProcess
from h2o_bench.gpu import Bench
from h2o_bench.gpu_grid import Cell, measure_cell
from h2o_bench.gpu_sections import PEERS
from h2o_bench.gpu_torch import answers
from h2o_bench.llama_tools import LlamaTools
from h2o_bench.models import config
from h2o_bench.texts import Texts
from h2o_cpp.model.policy import Policy

_COMPILED = "transformers, static cache, compiled"
_MOST = 150.0  # seconds for an engine


def measure_ours(bench: Bench, shape: str, type_name: str, path: Path) -> None:
    """With the full cache, and with a fixed number of slots where they are fewer."""
    plan, name = bench.plan, f"{shape} {type_name}"
    with bench.measuring(PEERS, name, OURS):
        model = bench.load(shape, type_name, path)
        for n in plan.grid_prompts:
            texts = Texts(model, Policy.full(), n_ctx=n + 1, n_batch=n)
            for i in range(-1, plan.rounds):  # the first is a warm-up
                texts.reset()
                seconds = texts.read(n)
                if i >= 0:
                    bench.record(PEERS, f"{name}, {n} tokens", f"{OURS}, full", "seconds", seconds)
            del texts
        for batch, contexts in ((1, plan.peer_alone), (plan.together, plan.peer_together)):
            for context in contexts:
                cells = [Cell(batch, context, "full", 0)]
                if plan.fixed < context:
                    cells.append(Cell(batch, context, f"{plan.fixed} slots", plan.fixed))
                for cell in cells:
                    measure_cell(bench, PEERS, model, name, cell, f"{OURS}, ")


def measure_llama_cpp(bench: Bench, shape: str, type_name: str, path: Path) -> None:
    """Its programs with the same file."""
    plan, name = bench.plan, f"{shape} {type_name}"
    if bench.llama_cpp is None:
        bench.absent(PEERS, name, LLAMA_CPP, "no --llama-cpp was given")
        return
    if not bench.has_time(PEERS, name, LLAMA_CPP, 20.0):
        return
    bench.progress(f"{name}: {LLAMA_CPP}")
    tools = LlamaTools(bench.llama_cpp, bench.device, min(_MOST, bench.left()))
    with bench.measuring(PEERS, name, LLAMA_CPP):
        version, prompts = tools.prefill(path, plan.grid_prompts, min(2, plan.rounds))
        bench.record(PEERS, name, LLAMA_CPP, "version", note=version)
        for n, seconds in prompts.items():
            bench.record(PEERS, f"{name}, {n} tokens", LLAMA_CPP, "seconds", *seconds)
        steps = {
            1: tools.decode(path, plan.peer_alone, plan.peer_steps, plan.rounds),
            plan.together: tools.decode_together(
                path, plan.peer_together, plan.together, 2 * plan.peer_steps
            ),
        }
        for batch, found in steps.items():
            for context, step in found.items():
                label = f"{name}, batch {batch}, after {context}"
                bench.record(PEERS, label, LLAMA_CPP, "step seconds", step)


def measure_transformers(bench: Bench, shape: str) -> None:
    """In f16 with a DynamicCache; then one text with a StaticCache and compiled steps."""
    plan, name = bench.plan, f"{shape} F16"
    if not bench.has_time(PEERS, name, TORCH, 30.0):
        return
    bench.progress(f"{name}: transformers")
    cases = [(n, plan.n_timed + 1, 1) for n in plan.peer_alone]
    cases += [(n, plan.n_timed + 1, plan.together) for n in plan.peer_together]
    for answer in answers(bench, shape, cases, (), plan.n_timed, _MOST):
        prompt, _, batch = answer["case"]
        label = f"{name}, batch {batch}, after {prompt}"
        if "error" in answer:
            bench.absent(PEERS, label, TORCH, answer["error"])
            continue
        bench.record(PEERS, name, TORCH, "version", note=answer["version"])
        bench.record(PEERS, label, TORCH, "step seconds", *answer["samples"]["0"])
        if batch == 1 and prompt in plan.grid_prompts:
            label = f"{name}, {prompt} tokens"
            bench.record(PEERS, label, TORCH, "seconds", answer["prefill"])
    if bench.has_time(PEERS, name, _COMPILED, 60.0):
        bench.progress(f"{name}: {_COMPILED}")
        with bench.measuring(PEERS, name, _COMPILED):
            _compiled(bench, shape)


def _compiled(bench: Bench, shape: str) -> None:
    plan, name = bench.plan, f"{shape} F16"
    contexts = plan.peer_together  # the longer the cache, the slower all steps
    n = plan.n_warm + plan.n_timed
    static = max(contexts) + n + 1
    changes = {**plan.changes, "max_position_embeddings": static}
    options = {
        "config": config(shape, **changes),
        "dtype": "float16",
        "device": bench.device,
        "static": static,
    }
    module = "h2o_bench.engines.transformers"
    try:
        with EngineProcess(module, options, timeout=max(1.0, min(_MOST, bench.left()))) as engine:
            for context in contexts:
                engine.decode(context, plan.n_warm)
                seconds = engine.decode(context + plan.n_warm, plan.n_timed).seconds
                label = f"{name}, batch 1, after {context}"
                bench.record(PEERS, label, _COMPILED, "step seconds", *seconds)
    except EngineError as error:
        bench.absent(PEERS, name, _COMPILED, str(error))
