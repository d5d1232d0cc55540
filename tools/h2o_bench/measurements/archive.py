"""Decode of a long text by a bounded cache with an archive, and by a full cache.

Layers of a real model's shape with random weights read a text of random tokens, with a full cache
and with caches of some per cent that archive what they evict. Then each decodes a token by turns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from h2o_bench.results import Row
from h2o_cpp import Policy
from h2o_cpp.budget.policy import choose_policy
from h2o_cpp.cli.argument_types import fractions, kv_types
from h2o_cpp.measure.speed import decode_seconds, prefill_seconds
from h2o_cpp.model.session import open_model, open_session
from support.shapes import SHAPES, config
from support.synthetic import write_model

_BATCH = 512
_VOCABULARY = 512  # so that the layers dominate a step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="SmolLM2-135M", metavar="SHAPE")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=100_000, help="that are read")
    parser.add_argument("--decoded", type=int, default=100, help="after that, by each cache")
    parser.add_argument("--budget", type=fractions, default=[0.1, 0.05], metavar="X,...")
    parser.add_argument("--archive", type=kv_types, default="q8_0", metavar="TYPE[,TYPE]")
    parser.add_argument("--pages", type=int, help="that a token recalls (default: by n_ctx)")
    parser.add_argument("--threads", type=int, default=2)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    n_ctx = args.tokens + args.decoded
    sizes = {"num_hidden_layers": args.layers, "vocab_size": _VOCABULARY}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        write_model(path, config(args.shape, **sizes, max_position_embeddings=n_ctx), "Q8_0")
        model = open_model(path, device="cpu", threads=args.threads)
    sessions = {"full": open_session(model, Policy.full(), n_ctx=n_ctx, n_batch=_BATCH)}
    for budget in args.budget:
        sessions[f"{budget:.0%}, archive"] = open_session(
            model, choose_policy(budget, None, None, n_ctx), n_ctx=n_ctx, n_batch=_BATCH,
            archive=args.archive, archive_pages=args.pages,
        )  # fmt: skip
    tokens = np.random.default_rng(0).integers(_VOCABULARY, size=n_ctx, dtype=np.int32)
    # The time per token with almost no attention.
    short = open_session(model, Policy.full(), n_ctx=_BATCH, n_batch=_BATCH)
    least = median(decode_seconds(short, tokens[: args.decoded + 1], 1))
    reading = {n: prefill_seconds(s, tokens[: args.tokens]) for n, s in sessions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for i in range(args.tokens, n_ctx):
        for name, session in sessions.items():
            begun = perf_counter()
            session.step([(0, tokens[i : i + 1])])
            seconds[name].append(perf_counter() - begun)
    whole = median(seconds["full"])
    for name, session in sessions.items():
        token = median(seconds[name])
        yield {
            "cache": name,
            "MiB": session.cache_bytes / 2**20,
            "archive, MiB": session.archive_bytes / 2**20,
            "ms per token": [1e3 * s for s in seconds[name]],
            "speed-up": whole / token,
            "more than in a short text, ms": 1e3 * (token - least),
            "speed-up of that": (whole - least) / (token - least),
            "prefill, s": reading[name],
        }
