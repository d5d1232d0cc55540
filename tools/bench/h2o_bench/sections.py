"""The sections of the comparison."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

import numpy as np

from h2o_bench.baselines import everyone, llama_cpp, openvino, ours
from h2o_bench.comparison import Baseline, Comparison, Request
from h2o_bench.engine_names import OURS
from h2o_bench.matmul_peak import matmul_peak
from h2o_bench.models import Models, config
from h2o_bench.records import Record, Results
from h2o_cpp import KVCache, Policy, _core
from h2o_cpp.measure import machine
from h2o_cpp.measure.traffic import (
    decode_weight_bytes,
    experts_used,
    kv_bytes,
    prefill_flops,
    weights,
)
from h2o_cpp.model.session import open_model

FIXED_SLOTS = 1024  # of the cache that does not depend on the context
SHARE = 0.2  # of the context, for the other cache


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    shapes: Sequence[str] = ("TinyLlama-1.1B", "OPT-1.3B", "SmolLM2-135M", "Pythia-410M")
    types: Sequence[str] = ("F16", "Q8_0", "Q4_0", "Q4_K_M")
    prompts: Sequence[int] = (512, 2048)  # the first in every round, the others only in the first
    context: int = 128
    n_decode: int = 32
    rounds: int = 3
    # Section 2: shape, layers and contexts, and whether to measure OpenVINO's eviction.
    contexts: Sequence[tuple[str, int, Sequence[int], bool]] = (
        ("MHA-12", 12, (128, 1024, 2048, 4096, 8192), False),
        ("TinyLlama-1.1B", 22, (1024, 8192), True),
        ("MHA-12", 1, (1024, 4096, 16384, 65536), False),
    )
    slots: Sequence[int] = (1024, 4096)  # section 3
    steps: int = 200  # attention alone
    first: str = "TinyLlama-1.1B"  # section 4


# `--quick`: a check that everything works.
QUICK = Plan(
    shapes=("SmolLM2-135M",),
    types=("Q8_0",),
    prompts=(64, 128),
    context=16,
    n_decode=4,
    rounds=2,
    contexts=(("SmolLM2-135M", 2, (64, 256), True),),
    slots=(64,),
    steps=20,
    first="SmolLM2-135M",
)


@dataclass(frozen=True)
class Bench:
    """State shared by all sections."""

    plan: Plan
    models: Models
    results: Results
    threads: int
    wheel: Path | None = None
    engines: tuple[str, ...] = ()  # sections 1 and 2, prefixes of names; (): all
    ik: Path | None = None  # ik_llama.cpp's llama-bench, for section 1

    def wants(self, engine: str) -> bool:
        """Whether an engine is to be measured."""
        return not self.engines or engine.startswith(self.engines)


def measure_machine(bench: Bench) -> None:
    """The machine's limits: read bandwidth and operations of matrix products per second."""

    def record(library: str, measure: str, value: float) -> None:
        bench.results.add(Record(0, machine.processor(), library, measure, (value,)))

    record(OURS, "processors", machine.n_processors())
    record(OURS, "threads", bench.threads)
    for library in ("numpy", "torch"):
        try:
            peaks = matmul_peak(library, bench.threads)
        except RuntimeError as error:
            bench.results.add(Record(0, machine.processor(), library, "absent", note=str(error)))
            continue
        for type_name, value in peaks.items():
            record(library, type_name, value)


def _record_bandwidth(bench: Bench) -> None:
    """The memory's read bandwidth now: it varies on shared machines."""
    bandwidth = machine.read_bandwidth(bench.threads)
    bench.results.add(Record(0, machine.processor(), OURS, "read bandwidth", (bandwidth,)))


def measure_speed(bench: Bench) -> None:
    """Section 1: prefill and decode of every shape, type and engine."""
    plan = bench.plan
    for shape in plan.shapes:
        for type_name in plan.types:
            path = bench.models.gguf(shape, type_name)
            with Comparison(bench.results, 1, f"{shape} {type_name}") as comparison:
                _record_limits(comparison, bench, path)
                n_ctx = max(plan.prompts) + plan.n_decode
                for one in everyone(bench.models, shape, type_name, bench.threads, n_ctx, bench.ik):
                    if not bench.wants(one[0]):
                        continue
                    if isinstance(one, Baseline):
                        comparison.open([one])
                    else:
                        comparison.absent(*one)
                first, *longer = (Request(n) for n in plan.prompts)
                decode = Request(plan.n_decode, plan.context)
                comparison.warm_up()
                comparison.ask([first, decode, *longer])
                comparison.ask([first, decode], plan.rounds - 1)


def measure_contexts(bench: Bench) -> None:
    """Section 2: decode and memory against context, for full and bounded caches."""
    type_name = "Q8_0"
    for shape, n_layers, contexts, evicting_baseline in bench.plan.contexts:
        n_ctx = max(contexts) + 64
        sizes = {"num_hidden_layers": n_layers, "max_position_embeddings": n_ctx}
        path = bench.models.gguf(shape, type_name, **sizes)
        _record_bandwidth(bench)
        n_real = config(shape)["num_hidden_layers"]
        depth = "" if n_layers == n_real else f", {n_layers} of {n_real} layers"
        with Comparison(bench.results, 2, f"{shape} {type_name}{depth}") as comparison:
            slots = f"{OURS}, {FIXED_SLOTS} slots"
            all_along = [
                ours(path, bench.threads, name=f"{OURS}, full", n_ctx=n_ctx),
                ours(path, bench.threads, name=f"{OURS}, q8_0", n_ctx=n_ctx, kv_dtype="q8_0"),
                ours(path, bench.threads, name=slots, n_ctx=n_ctx, hh=FIXED_SLOTS),
                llama_cpp(path, bench.threads, n_ctx),
                llama_cpp(path, bench.threads, n_ctx, name="llama.cpp, q8_0", kv_dtype="q8_0"),
                llama_cpp(
                    path,
                    bench.threads,
                    n_ctx,
                    name="llama.cpp, no flash attention",
                    flash_attn=False,
                ),
            ]
            comparison.open(one for one in all_along if bench.wants(one.name))
            for context in contexts:
                kept = int(SHARE * context)
                share = ours(path, bench.threads, name=f"{OURS}, hh={SHARE}", n_ctx=n_ctx, hh=kept)
                guests = [share]
                if evicting_baseline and context == max(contexts):
                    # The minimum: a block at the start, one to evict and a recent one.
                    kept = max(96, kept // 32 * 32)
                    n_vocab = config(shape)["vocab_size"]
                    guests.append(openvino(path, bench.threads, n_vocab, kept))
                guests = [one for one in guests if bench.wants(one.name)]
                comparison.open(guests)
                comparison.ask([Request(16, context, repeats=2)])
                for guest in guests:
                    comparison.close(guest.name)


def measure_machinery(bench: Bench) -> None:
    """Section 3: the cost of scores and eviction, against a window with as many slots."""
    shape, type_name = "SmolLM2-135M", "Q8_0"
    for slots in bench.plan.slots:
        path = bench.models.gguf(shape, type_name)
        _record_bandwidth(bench)
        with Comparison(bench.results, 3, f"{shape} {type_name}, {slots} slots") as comparison:
            comparison.open(
                ours(path, bench.threads, name=policy, hh=slots, policy=policy)
                for policy in ("window", "h2o")
            )
            context = slots + slots // 4
            comparison.ask([Request(16, context, repeats=4)], bench.plan.rounds)
        for n_kv_heads in (32, 4):
            _measure_attention(bench, slots, n_kv_heads)


def _measure_attention(bench: Bench, slots: int, n_kv_heads: int) -> None:
    """Attention of one layer alone, token by token, with full caches in turns."""
    n_heads, head_dim = 32, 64
    random = np.random.default_rng(0)
    caches = {
        name: KVCache(n_heads, n_kv_heads, head_dim, policy, threads=bench.threads)
        for name, policy in (
            ("window", Policy.window(slots)),
            ("h2o", Policy.h2o(slots // 2, slots - slots // 2)),
        )
    }
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    for step in range(-1, bench.plan.steps):
        n = slots + 1 if step < 0 else 1  # the first fills them
        q = random.standard_normal((n, n_heads, head_dim), np.float32)
        k, v = (random.standard_normal((n, n_kv_heads, head_dim), np.float32) for _ in range(2))
        for name, cache in caches.items():
            begun = perf_counter()
            cache.attend(q, k, v)
            if step >= 0:
                seconds[name].append(perf_counter() - begun)
    model = f"attention alone, {n_heads} heads, {n_kv_heads} KV heads, {slots} slots"
    for name, values in seconds.items():
        bench.results.add(Record(3, model, name, "attend seconds", tuple(values)))


def measure_start(bench: Bench) -> None:
    """Section 4: the time to the first token in a new process."""
    shape, type_name = bench.plan.first, "Q8_0"
    path = bench.models.gguf(shape, type_name)
    n_prompt = bench.plan.prompts[0]
    n_vocab = config(shape)["vocab_size"]
    path.read_bytes()  # into the page cache
    for _ in range(bench.plan.rounds):
        for one in (
            ours(path, bench.threads),
            llama_cpp(path, bench.threads, n_prompt + 64),
            openvino(path, bench.threads, n_vocab),
        ):
            sleep(0.2)
            with Comparison(bench.results, 4, f"{shape} {type_name}") as comparison:
                comparison.open([one])
                comparison.ask([Request(n_prompt)])
        bench.results.add(
            Record(4, f"{shape} {type_name}", OURS, "import_seconds", (_import_seconds(),))
        )
    wheel = bench.wheel
    bench.results.add(
        Record(4, "wheel", OURS, "absent", note="no --wheel was given")
        if wheel is None
        else Record(4, "wheel", OURS, "bytes", (float(wheel.stat().st_size),), wheel.name)
    )


def _import_seconds() -> float:
    """Seconds to import h2o_cpp in a new process."""
    code = (
        "from time import perf_counter as now; begun = now(); import h2o_cpp; print(now() - begun)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout)


def _record_limits(comparison: Comparison, bench: Bench, path: Path) -> None:
    """Bytes read and operations per token in this engine, and the current memory bandwidth."""
    n_seen = bench.plan.context + bench.plan.n_decode / 2
    model = _core.GgufShards(path)
    tensors = weights(model.files)
    used = experts_used(model.files[0])
    loaded = open_model(path, device="cpu", threads=1)
    per_token = loaded.n_layers * kv_bytes(loaded.n_kv_heads, loaded.head_dim, "f16")
    n_bytes = decode_weight_bytes(tensors, used) + n_seen * per_token
    comparison.record(OURS, "bytes per token", n_bytes)
    comparison.record(OURS, "flops per token", prefill_flops(tensors, used))
    comparison.record(OURS, "read bandwidth", machine.read_bandwidth(bench.threads))


SECTIONS: dict[int, Callable[[Bench], None]] = {
    1: measure_speed,
    2: measure_contexts,
    3: measure_machinery,
    4: measure_start,
}
