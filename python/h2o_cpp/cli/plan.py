"""Choose how many sequences to decode at once, and which weights stay in memory, on the CPU.

The speed of each choice is predicted from the bandwidths of memory and storage and the speed of
matrix products, which are measured unless given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from h2o_cpp.cli.argument_types import budget, integer, number
from h2o_cpp.cli.cache_options import add_kv_dtype, add_max_sequences, add_n_batch
from h2o_cpp.cli.options import add_json, add_max_tokens, add_model, add_threads
from h2o_cpp.cli.parser import Parser
from h2o_cpp.cli.tables import mebibytes
from h2o_cpp.measure.planner import Plan, plan
from h2o_cpp.measure.prediction import Candidate
from h2o_cpp.model.arguments import bytes_of


def add_arguments(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--memory", required=True, metavar="SIZE",
        help="memory for weights, caches and activations together, such as 4GiB",
    )  # fmt: skip
    parser.add_argument(
        "-p", "--prompt-tokens", "--prompt", "--n-prompt", type=integer, default=512, metavar="N",
        help="each prompt has N tokens (default: %(default)s)",
    )  # fmt: skip
    add_max_tokens(parser, 128, "each output has N tokens", "--tokens")
    add_max_sequences(
        parser, "at most N sequences at once (default: any number)",
        "--sequences",
    )  # fmt: skip
    parser.add_argument(
        "--hh", type=budget, metavar="X",
        help="keep a fraction (0.2) or a number (400) of tokens, or auto (default: keep all)",
    )  # fmt: skip
    add_n_batch(parser, 512)
    add_kv_dtype(parser)
    add_threads(parser)
    for name, what in (
        ("memory", "bytes per second read from memory"),
        ("storage", "bytes per second read from storage"),
    ):
        parser.add_argument(
            f"--{name}-bandwidth", metavar="SIZE", help=f"{what} (default: measured)"
        )
    parser.add_argument(
        "--gflops", type=number, metavar="X",
        help="10^9 operations of matrix products per second (default: measured)",
    )  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    found = plan(
        args.model,
        args.memory,
        prompt=args.prompt_tokens,
        n=args.max_tokens,
        sequences=args.max_sequences,
        hh=args.hh,
        n_batch=args.n_batch,
        kv_dtype=args.kv_dtype,
        threads=args.threads,
        memory_bandwidth=_rate("memory_bandwidth", args.memory_bandwidth),
        storage_bandwidth=_rate("storage_bandwidth", args.storage_bandwidth),
        flops=None if args.gflops is None else args.gflops * 1e9,
    )
    if args.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print("\n".join(_lines(found)))
    return 0


def _rate(name: str, size: str | None) -> float | None:
    return None if size is None else float(bytes_of(name, size))


def _lines(found: Plan) -> Iterator[str]:
    speeds, job, best = found.speeds, found.job, found.chosen
    yield f"memory {speeds.memory / 1e9:.1f} GB/s, storage {speeds.storage / 1e9:.2f} GB/s, " + (
        f"arithmetic {speeds.flops / 1e9:.0f} GFLOP/s"
    )
    yield f"sequences of {job.prompt} + {job.n} tokens, a cache of {mebibytes(job.slab_bytes)} each"
    yield ""
    experts = any(one.streamed_experts for one in found.candidates)
    again = "experts of a layer read again" if experts else "layers read again"
    yield f"| weights in memory | {again} | sequences | caches | ms a pass | tokens/s |"
    yield "|---|---|---|---|---|---|"
    for one in _shown(found):
        rate = f"{one.tokens_per_second:.1f}"
        yield (
            f"| {mebibytes(one.weight_bytes)} "
            f"| {one.streamed_experts if experts else one.streamed_layers} | {one.sequences} "
            f"| {mebibytes(one.cache_bytes)} | {one.pass_seconds * 1e3:.1f} "
            f"| {f'**{rate}**' if one == best else rate} |"
        )
    yield ""
    options = [
        f"--{name.replace('_', '-')} {','.join(value) if isinstance(value, tuple) else value}"
        for name, value in found.arguments.items()
    ]
    yield f"plan: {' '.join(options)}"
    yield f"  {mebibytes(best.bytes)} of {mebibytes(found.memory)}, " + (
        f"{mebibytes(best.activation_bytes)} of it for activations"
    )
    yield f"  {found.why}"


def _shown(found: Plan) -> list[Candidate]:
    """All without streaming; of the others the first, last, fastest and chosen one."""
    stay = [one for one in found.candidates if not one.streams]
    stream = [one for one in found.candidates if one.streams]
    some = stream[:1] + stream[-1:]
    if stream:
        some += [max(stream, key=lambda one: one.tokens_per_second), found.chosen]
    return stay + [one for one in stream if one in some]
