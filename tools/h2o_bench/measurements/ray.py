"""Replicas under Ray Serve, and actors of a Ray Data job.

Starts Ray on this machine. One thread for each replica and actor.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from h2o_bench.load import Texts, run_clients
from h2o_bench.results import Row
from h2o_cpp import BUNDLED_MODEL, Generator

OPTIONS: Any = {"max_tokens": 64, "ignore_eos": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1024, help="texts, more than 64")
    parser.add_argument("--runs", type=int, default=3)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    prompts = [[3 + (i * 7 + j) % 250 for j in range(32)] for i in range(args.rows)]
    with Generator(args.model, threads=1, max_sequences=args.sequences) as generator:
        generator.generate(prompts[:8], **OPTIONS)
        begin = perf_counter()
        n = sum(text.completion_tokens for text in generator.generate(prompts, **OPTIONS))
        rate = n / (perf_counter() - begin)
    yield {"table": "a job", "by": "Generator.generate, no Ray", "tokens/s, steady": rate}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the same as without Ray
    import ray

    ray.init(
        num_cpus=4, object_store_memory=200 * 2**20, include_dashboard=False,
        logging_level=logging.ERROR, log_to_driver=False,
    )  # fmt: skip
    try:
        for n_actors in (1, 2):
            yield _job(args, prompts, n_actors)
        for n_replicas in (1, 2):
            yield _server(args, n_replicas)
    finally:
        ray.shutdown()


def _job(args: argparse.Namespace, prompts: list[list[int]], n_actors: int) -> Row:
    """Tokens/s of a job: without the start of its actors, and in total."""
    import ray

    from h2o_cpp.ray import generate

    rows = [{"prompt": prompt} for prompt in prompts]
    dataset = ray.data.from_items(rows, override_num_blocks=max(1, len(rows) // 32))
    job = generate(
        dataset, args.model, options=OPTIONS, concurrency=n_actors, batch_size=32,
        max_sequences=args.sequences,
    )  # fmt: skip
    begin = perf_counter()
    times = []
    n_tokens = 0
    for batch in job.iter_batches(batch_size=32):
        n_tokens += int(batch["completion_tokens"].sum())
        times.append((perf_counter(), n_tokens))
    (first, n_first), (last, _) = times[n_actors - 1], times[-1]
    steady, whole = (n_tokens - n_first) / (last - first), n_tokens / (last - begin)
    by = f"{n_actors} actors"
    return {"table": "a job", "by": by, "tokens/s, steady": steady, "with its start": whole}


def _server(args: argparse.Namespace, n_replicas: int) -> Row:
    """The best of some runs, which is least affected by other processes."""
    from ray import serve

    from h2o_cpp.ray import deployment

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    serve.start(http_options={"port": port}, proxy_location="HeadOnly")
    serve.run(deployment(args.model, num_replicas=n_replicas, max_sequences=args.sequences))
    texts = Texts(prompt=32, tokens=64)
    runs = [asyncio.run(run_clients(port, args.clients, texts)) for _ in range(args.runs + 1)]
    serve.shutdown()
    best = min(runs[1:], key=lambda seen: seen.seconds)
    return {"table": "streams", "by": f"{n_replicas} replicas", **best.cells()}
