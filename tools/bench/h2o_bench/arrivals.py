"""Requests arriving at random: continuous batching by the Engine against static batches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter, sleep

import numpy as np

from h2o_bench.engine_names import OURS
from h2o_bench.records import Record
from h2o_bench.shapes import N_SPECIAL
from h2o_bench.throughput import ARRIVALS, SHARE, Bench, memory_of
from h2o_cpp import capacity
from h2o_cpp.generation.batch import run_batch
from h2o_cpp.generation.engine import Engine
from h2o_cpp.generation.request import StreamOptions, make_request
from h2o_cpp.model.cache_memory import ModelShape
from h2o_cpp.model.runtime import Runtime, open_runtime


@dataclass(frozen=True)
class Arrival:
    """A request: its arrival in seconds, its prompt, and the number of tokens to generate."""

    at: float
    prompt: Sequence[int]
    n: int


@dataclass
class Observed:
    """Latencies seen by clients, in seconds; a piece of m tokens is m equal gaps."""

    seconds: float = 0.0  # from the first arrival to the last token
    n_tokens: int = 0
    first: list[float] = field(default_factory=list)  # time to first token, per request
    gaps: list[float] = field(default_factory=list)  # between tokens

    def add(self, at: float, seen: Sequence[tuple[float, int]]) -> None:
        """Add a request's arrival times of pieces and token counts."""
        (begun, had), *others = seen
        self.first.append(begun - at)
        for now, n in others:
            if n == had:  # the last, empty piece
                continue
            self.gaps += [(now - begun) / (n - had)] * (n - had)
            begun, had = now, n
        self.n_tokens += had
        self.seconds = max(self.seconds, begun)


def arrivals(n: int, rate: float | None, n_vocab: int, seed: int = 0) -> list[Arrival]:
    """Prompts of 16 to 512 tokens, outputs of 16 to 256, log-uniform.

    rate: requests per second of a Poisson process; None: all at once.
    """
    rng = np.random.default_rng(seed)
    found, at = [], 0.0
    for _ in range(n):
        prompt = rng.integers(N_SPECIAL, n_vocab, round(2 ** rng.uniform(4, 9)))
        found.append(Arrival(at, prompt.tolist(), round(2 ** rng.uniform(4, 8))))
        at += 0.0 if rate is None else rng.exponential(1 / rate)
    return found


def run_continuous(runtime: Runtime, requests: Sequence[Arrival]) -> Observed:
    """Run the requests on an Engine, each in an asyncio task."""
    observed = Observed()

    async def ask(engine: Engine, one: Arrival, begun: float) -> None:
        await asyncio.sleep(max(0.0, begun + one.at - perf_counter()))
        completion = await engine.submit_async(
            one.prompt, max_tokens=one.n, temperature=0.0, ignore_eos=True
        )
        seen = [(perf_counter() - begun, completion.n_read) async for _ in completion]
        _check(one, completion.n_read)
        if not seen or seen[-1][1] < one.n:  # the last tokens had no text
            seen.append((perf_counter() - begun, one.n))
        observed.add(one.at, seen)

    async def run(engine: Engine) -> None:
        begun = perf_counter()
        await asyncio.gather(*(ask(engine, one, begun) for one in requests))

    with Engine(lambda: runtime, random.Random(0), max_queue=len(requests)) as engine:
        asyncio.run(run(engine))
    return observed


def run_static(runtime: Runtime, requests: Sequence[Arrival]) -> Observed:
    """Run the arrived requests as a batch; later ones wait until it has ended."""
    observed = Observed()
    seeds = random.Random(0)
    todo, begun = [*requests], perf_counter()
    while todo:
        sleep(max(0.0, begun + todo[0].at - perf_counter()))
        now = perf_counter() - begun
        batch = [one for one in todo[: runtime.n_sequences] if one.at <= now]
        todo = todo[len(batch) :]
        checked = []
        for one in batch:
            options: StreamOptions = {"max_tokens": one.n, "temperature": 0.0, "ignore_eos": True}
            checked.append(make_request(runtime, seeds, one.prompt, options))
        seen: list[list[tuple[float, int]]] = [[] for _ in batch]
        for piece in run_batch(runtime.engine, checked, len(batch)):
            seen[piece.index].append((perf_counter() - begun, piece.state.n_tokens_read))
        for one, its in zip(batch, seen, strict=True):
            _check(one, its[-1][1])
            observed.add(one.at, its)
    return observed


def measure_arrivals(bench: Bench) -> None:
    """Section 23: both, with the full cache and a budget of 20%, in the table's memory."""
    plan, shape = bench.plan, bench.plan.shapes[0]
    path = bench.models.gguf(shape, "F16")
    whole = ModelShape.of_file(path)
    room = max(1, memory_of(bench, path, whole) - path.stat().st_size)
    n_ctx = 512 + 256  # longest request
    caches = {f"{OURS}, full": None, f"{OURS}, hh={SHARE}": SHARE}
    rate = None
    for name, hh in caches.items():
        k = max(1, capacity(path, room, hh=hh, n_ctx=n_ctx))
        runtime = open_runtime(
            path, hh=hh, recent=None, policy=None, n_ctx=n_ctx, positions="auto", n_batch=512,
            kv_dtype="f16", device="cpu", threads=bench.threads, max_sequences=k, memory=None,
            max_resident=None,
        )  # fmt: skip
        n_vocab = runtime.model.n_vocab
        at_once = run_continuous(runtime, arrivals(plan.requests, None, n_vocab))
        _record(bench, shape, f"{name}, continuous, all at once", k, at_once)
        if rate is None:  # identical for all
            rate = plan.load * plan.requests / at_once.seconds
            bench.results.add(Record(ARRIVALS, shape, "", "requests/s", (rate,)))
        requests = arrivals(plan.requests, rate, n_vocab)
        _record(bench, shape, f"{name}, static", k, run_static(runtime, requests))
        _record(bench, shape, f"{name}, continuous", k, run_continuous(runtime, requests))


def _record(bench: Bench, shape: str, name: str, k: int, observed: Observed) -> None:
    def add(measure: str, values: Sequence[float]) -> None:
        bench.results.add(Record(ARRIVALS, shape, name, measure, tuple(values)))

    add("sequences", [k])
    add("tokens/s", [observed.n_tokens / observed.seconds])
    add("seconds to the first token", observed.first)
    quantiles = np.quantile(observed.gaps, [0.5, 0.99])
    add("seconds between tokens, p50 and p99", quantiles.tolist())


def _check(one: Arrival, n_tokens: int) -> None:
    if n_tokens != one.n:
        raise RuntimeError(f"got {n_tokens} tokens, expected {one.n}")
