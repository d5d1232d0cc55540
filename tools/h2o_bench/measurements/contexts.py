"""Decode and memory against context, for full and bounded caches, beside llama.cpp.

Every engine is opened for the context that it is measured after, as its user would.

**Factors** are those of h2o.cpp's full cache over this one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from h2o_bench.baselines import OURS, SHARE, llama_cpp, openvino, ours
from h2o_bench.chart import Chart
from h2o_bench.comparison import Request, compare, use_processors
from h2o_bench.models import Models
from h2o_bench.results import Row
from support.shapes import config

SLOTS = 1024  # of the cache that does not depend on the context
BASE = f"{OURS}, full"
LABELS = {
    f"{OURS}, {SLOTS} slots": f"h2o.cpp, {SLOTS} tokens kept",
    "llama.cpp": "llama.cpp, flash attention",
    BASE: "h2o.cpp, all tokens kept",
}
CHART = Chart(
    line="engine",
    x="context",
    x_title="tokens of context",
    y={"tokens/s": "Tokens per second", "MiB": "Memory of the process, MiB"},
    labels=LABELS,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="MHA-12", metavar="NAME")
    parser.add_argument("--layers", type=int, metavar="N", help="(default: as the real model)")
    parser.add_argument("--contexts", default="128,1024,2048,4096,8192", metavar="N,...")
    parser.add_argument(
        "--engines", default="", metavar="NAME,...", help="beginnings of names (default: all)"
    )
    parser.add_argument("--drawn", action="store_true", help="only engines that --plot draws")
    parser.add_argument("--models", type=Path, metavar="DIR", help="(default: temporary)")
    parser.add_argument("--threads", type=int, default=2)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    use_processors(args.threads)
    contexts = [int(n) for n in args.contexts.split(",")]
    shape, threads = args.shape, args.threads
    n_real = config(shape)["num_hidden_layers"]
    n_layers = args.layers or n_real
    model = f"{shape} Q8_0" + ("" if n_layers == n_real else f", {n_layers} of {n_real} layers")
    with nullcontext(args.models) if args.models else TemporaryDirectory() as directory:
        sizes = {"num_hidden_layers": n_layers, "max_position_embeddings": max(contexts) + 64}
        path = Models(Path(directory)).gguf(shape, "Q8_0", **sizes)
        for context in contexts:
            n_ctx, kept = context + 64, int(SHARE * context)
            engines = [
                ours(path, threads, name=BASE, n_ctx=n_ctx),
                ours(path, threads, name=f"{OURS}, q8_0", n_ctx=n_ctx, kv_dtype="q8_0"),
                ours(path, threads, name=f"{OURS}, {SLOTS} slots", n_ctx=n_ctx, hh=SLOTS),
                ours(path, threads, name=f"{OURS}, hh={SHARE}", n_ctx=n_ctx, hh=kept),
                llama_cpp(path, threads, n_ctx),
                llama_cpp(path, threads, n_ctx, ", q8_0", kv_dtype="q8_0"),
                llama_cpp(path, threads, n_ctx, ", no flash attention", flash_attn=False),
            ]
            if config(shape)["model_type"] == "llama" and kept >= 96:
                # A block at the start, one to evict and a recent one.
                n_vocab = config(shape)["vocab_size"]
                engines.append(openvino(path, threads, n_vocab, cache_tokens=kept // 32 * 32))
            request = Request(16, context, repeats=2)
            wanted = [one for one in engines if one.name.startswith(tuple(args.engines.split(",")))]
            if args.drawn:
                wanted = [one for one in wanted if one.name in LABELS]
            for row in compare(wanted, [request], 1, model=model, context=context):
                cells = dict(row)
                rates = {k: cells.pop(k) for k in [request.measure, "MiB"] if k in cells}
                cells.pop("ms per step", None)
                yield {**cells, **dict(zip(("tokens/s", "MiB"), rates.values(), strict=False))}
