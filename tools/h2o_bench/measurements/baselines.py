"""Prefill and decode of every shape and type on the CPU, beside other engines.

Baselines are those that are installed (extras `engines` and `reference`), each in its own process
on the same cores, in turns; token counts are checked. Weights are random. Run it on a quiet
machine. **Factors** are h2o.cpp's median over this engine's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from h2o_bench.baselines import OURS, everyone
from h2o_bench.comparison import Request, compare, use_processors
from h2o_bench.models import Models
from h2o_bench.results import Row
from h2o_cpp import _core
from h2o_cpp.measure import machine
from h2o_cpp.measure.traffic import (
    decode_weight_bytes,
    experts_used,
    kv_bytes,
    prefill_flops,
    weights,
)

BASE = OURS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes", default="TinyLlama-1.1B,OPT-1.3B,SmolLM2-135M,Pythia-410M", metavar="NAME,..."
    )
    parser.add_argument("--types", default="F16,Q8_0,Q4_0,Q4_K_M", metavar="NAME,...")
    parser.add_argument("--prompts", default="512,2048", metavar="N,...", help="read")
    parser.add_argument("--context", type=int, default=128, help="tokens before those decoded")
    parser.add_argument("--decoded", type=int, default=32, help="tokens")
    parser.add_argument(
        "--engines", default="", metavar="NAME,...", help="beginnings of names (default: all)"
    )
    parser.add_argument("--ik", type=Path, metavar="FILE", help="ik_llama.cpp's llama-bench")
    parser.add_argument("--models", type=Path, metavar="DIR", help="(default: temporary)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    use_processors(args.threads)
    wanted = tuple(args.engines.split(","))
    first, *longer = (Request(int(n)) for n in args.prompts.split(","))
    decode = Request(args.decoded, args.context)
    n_ctx = max(one.n for one in (first, *longer)) + args.context + args.decoded
    with nullcontext(args.models) if args.models else TemporaryDirectory() as directory:
        models = Models(Path(directory))
        for shape in args.shapes.split(","):
            for dtype in args.types.split(","):
                bandwidth = machine.read_bandwidth(args.threads)
                engines = everyone(models, shape, dtype, args.threads, n_ctx, args.ik)
                rows = compare(
                    (one for one in engines if one.name.startswith(wanted)),
                    [first, decode, *longer], args.rounds, model=f"{shape} {dtype}",
                )  # fmt: skip
                n_seen = args.context + args.decoded / 2
                limits = _per_token(models.gguf(shape, dtype), n_seen)
                for row in rows:
                    yield {**row, **_use(row, first, decode, limits, bandwidth)}


def _per_token(path: Path, n_seen: float) -> tuple[float, float]:
    """Bytes that decoding a token reads, and operations of prefill."""
    files = _core.GgufShards(path)
    tensors, used = weights(files.files), experts_used(files.files[0])
    config = _core.Config(files)
    cached = config.n_layers * kv_bytes(config.n_kv_heads, config.head_dim, "f16")
    return decode_weight_bytes(tensors, used) + n_seen * cached, prefill_flops(tensors, used)


def _use(
    row: Row, first: Request, decode: Request, limits: tuple[float, float], bandwidth: float
) -> dict[str, float]:
    """Our engine's bytes and operations per second, and its share of the read bandwidth."""
    if row["engine"] != OURS or "absent" in row:
        return {}
    read = median(row[decode.measure]) * limits[0]
    flops = median(row[first.measure]) * limits[1]
    return {"GB/s": read / 1e9, "of reading, %": 100 * read / bandwidth, "GFLOP/s": flops / 1e9}
