"""Cost of scores and eviction: h2o beside a window with as many slots."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np

from h2o_bench.baselines import ours
from h2o_bench.comparison import Request, compare, use_processors
from h2o_bench.models import Models
from h2o_bench.results import Row
from h2o_cpp import KVCache, Policy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="SmolLM2-135M", metavar="NAME")
    parser.add_argument("--slots", default="1024,4096", metavar="N,...")
    parser.add_argument("--steps", type=int, default=200, help="of attention alone")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    use_processors(args.threads)
    with TemporaryDirectory() as directory:
        path = Models(Path(directory)).gguf(args.shape, "Q8_0")
        for slots in map(int, args.slots.split(",")):
            engines = [
                ours(path, args.threads, name=policy, hh=slots, policy=policy)
                for policy in ("window", "h2o")
            ]
            request = Request(16, slots + slots // 4, repeats=4)
            rows = {row["engine"]: row for row in compare(engines, [request], args.rounds)}
            yield _compared(
                f"{args.shape} Q8_0, {slots} slots",
                {name: [1e3 * ms for ms in row["ms per step"]] for name, row in rows.items()},
            )
            for n_kv_heads in (32, 4):
                what = f"attention alone, 32 heads, {n_kv_heads} KV heads, {slots} slots"
                found = attention(slots, n_kv_heads, args.steps, args.threads)
                yield _compared(what, found)


def attention(slots: int, n_kv_heads: int, n_steps: int, threads: int) -> dict[str, list[float]]:
    """Microseconds of attention of one layer, token by token, with full caches in turns."""
    n_heads, head_dim = 32, 64
    random = np.random.default_rng(0)
    policies = {
        "window": Policy.window(slots),
        "h2o": Policy.h2o(slots // 2, slots - slots // 2),
    }
    caches = {
        name: KVCache(n_heads, n_kv_heads, head_dim, policy, threads=threads)
        for name, policy in policies.items()
    }
    found: dict[str, list[float]] = {name: [] for name in caches}
    for step in range(-1, n_steps):
        n = slots + 1 if step < 0 else 1  # the first fills them
        q = random.standard_normal((n, n_heads, head_dim), np.float32)
        k, v = (random.standard_normal((n, n_kv_heads, head_dim), np.float32) for _ in range(2))
        for name, cache in caches.items():
            begun = perf_counter()
            cache.attend(q, k, v)
            if step >= 0:
                found[name].append(1e6 * (perf_counter() - begun))
    return found


def _compared(what: str, us: dict[str, list[float]]) -> Row:
    more = median(us["h2o"]) / median(us["window"]) - 1
    return {"": what, "window, us": us["window"], "h2o, us": us["h2o"], "h2o takes": f"{more:+.1%}"}
