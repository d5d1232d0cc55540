"""A long stream with a full and with bounded caches: speed by window of tokens, and memory.

For each cache a process generates from the same prompt; the runs take turns. Resident memory is
that of the whole process; its growth is that since the first window.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import perf_counter
from typing import Any

from h2o_bench.results import Row
from h2o_cpp import BUNDLED_MODEL, Generator
from h2o_cpp.measure.machine import rss_bytes

BUDGETS: tuple[float | None, ...] = (None, 0.4, 0.2, 0.1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--window", type=int, default=250, help="tokens")
    parser.add_argument("--threads", type=int, default=2)


def run(hh: float | None, n: int, window: int, threads: int) -> dict[str, Any]:
    """A run: tokens/s of each window, growth, and the cache."""
    generator = Generator(BUNDLED_MODEL, hh=hh, threads=threads)
    pieces = generator.stream("The old man", max_tokens=n, temperature=0.8, seed=1, ignore_eos=True)
    rates: list[float] = []
    memory: list[int] = []
    begin = perf_counter()
    for _ in pieces:
        if len(pieces.tokens) // window > len(rates):
            rates.append(window / (perf_counter() - begin))
            memory.append(rss_bytes())
            begin = perf_counter()
    if len(rates) != n // window:
        raise RuntimeError(f"got {len(pieces.tokens)} tokens, expected {n}")
    stats = generator.stats()
    growth = (memory[-1] - memory[0]) / 1024
    return {"rates": rates, "growth": growth, "kept": stats.tokens_kept, "b": stats.cache_bytes}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    runs: dict[float | None, list[dict[str, Any]]] = {hh: [] for hh in BUDGETS}
    for _ in range(args.rounds):
        for hh in BUDGETS:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                one = process.submit(run, hh, args.tokens, args.window, args.threads)
                runs[hh].append(one.result())
    for hh, found in runs.items():
        yield {
            "hh": "full" if hh is None else str(hh),
            "kept": found[0]["kept"],
            "cache, KiB": found[0]["b"] / 1024,
            **{
                f"tokens/s up to {(w + 1) * args.window}": [one["rates"][w] for one in found]
                for w in range(args.tokens // args.window)
            },
            "growth, KiB": [one["growth"] for one in found],
        }
