"""Measure the speed of a model: prefill and decode, memory, and the share of memory bandwidth.

Decoding a token reads all weights except lookup tables, and K and V of the kept tokens. "of
reading" compares this rate with reading a large array by as many threads.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from h2o_cpp.cli.argument_types import integer
from h2o_cpp.cli.cache_options import add_cache, options_of
from h2o_cpp.cli.options import add_json, add_machine, add_max_tokens, add_model
from h2o_cpp.cli.output import mebibytes, print_table, put, put_json
from h2o_cpp.cli.parser import Parser
from h2o_cpp.measure.speed import Measurement, Workload, measure
from h2o_cpp.options import CacheOptions


def add_arguments(parser: Parser) -> None:
    add_model(parser, bundled=True)
    parser.add_argument(
        "-p", "--prompt-tokens", "--prompt", "--n-prompt", type=integer, default=512, metavar="N",
        help="read a prompt of N random tokens (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-d", "--depth", "--context", "--n-depth", type=integer, default=128, metavar="N",
        help="decode after N tokens (default: %(default)s)",
    )  # fmt: skip
    add_max_tokens(parser, 32, "decode N tokens", "--tokens", "--n-gen")
    parser.add_argument(
        "-r", "--rounds", "--repetitions", type=integer, default=3, metavar="K",
        help="repeat K times and report the median (default: %(default)s)",
    )  # fmt: skip
    add_cache(parser)
    add_machine(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    found = measure(
        args.model,
        Workload(args.prompt_tokens, args.depth, args.max_tokens, args.rounds),
        device=args.device,
        threads=args.threads,
        cache=options_of(args, CacheOptions),
    )
    if args.json:
        put_json(asdict(found))
        return 0
    put(f"{found.model} on {found.machine}, {found.backend}")
    print_table(_rows(found))
    return 0


def _rows(found: Measurement) -> dict[str, str]:
    cache = f"{mebibytes(found.cache_bytes)}, full {mebibytes(found.full_cache_bytes)}"
    if found.archive is not None:
        cache += f", archive {mebibytes(found.archive_bytes)}"
    return {
        f"prefill of {found.prompt_tokens} tokens": _rate(
            found.prefill_tokens_per_second, found.prefill_spread
        ),
        "of numpy's matrix product, f32": _share(
            found.matmul_fraction, found.matmul_flops, "GFLOP/s"
        ),
        f"decode of {found.decode_tokens} after {found.context_tokens}": _rate(
            found.decode_tokens_per_second, found.decode_spread
        ),
        "of reading": _share(found.read_bandwidth_fraction, found.read_bandwidth, "GB/s"),
        "read for a token": f"weights {mebibytes(found.decode_weight_bytes)},"
        f" K and V {mebibytes(found.decode_kv_bytes)}",
        "weights": mebibytes(found.weight_bytes),
        "cache": cache,
        "peak resident memory": (
            "unknown" if found.peak_rss_bytes is None else mebibytes(found.peak_rss_bytes)
        ),
        "load": f"{found.load_seconds:.3f} s",
    }


def _share(fraction: float | None, limit: float | None, unit: str) -> str:
    if fraction is None or limit is None:
        return "unknown on a GPU"
    return f"{fraction:.0%} of {limit / 1e9:.1f} {unit}"


def _rate(median: float, spread: tuple[float, float]) -> str:
    return f"{median:.1f} tokens/s ({spread[0]:.1f} to {spread[1]:.1f})"
