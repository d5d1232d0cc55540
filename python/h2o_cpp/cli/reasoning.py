"""Measure how well a model solves problems with long traces, with every policy and budget."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import isnan

from h2o_cpp.cli.argument_types import integer, names
from h2o_cpp.cli.cache_options import add_archive, add_kv_dtype, options_of
from h2o_cpp.cli.comparison import add_budgets, add_outputs, show_rows, shows_table
from h2o_cpp.cli.files import STANDARD, check_outputs
from h2o_cpp.cli.options import add_machine, add_model
from h2o_cpp.cli.output import put
from h2o_cpp.cli.parser import Parser
from h2o_cpp.eval.reasoning.measurement import (
    PROTECTED,
    Measurement,
    make_problems,
    measure,
)
from h2o_cpp.eval.reasoning.problems import FAMILIES
from h2o_cpp.options import ArchiveOptions


def add_arguments(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--tasks", "--task", type=names, default=list(FAMILIES), metavar="NAME,...",
        help=f"families of problems, of {', '.join(FAMILIES)} (default: all)",
    )  # fmt: skip
    add_budgets(parser, [0.125, 0.25, 0.5], "the mean length of a problem with its solution")
    parser.add_argument(
        "--protect", type=names, default=list(PROTECTED), metavar="NAME,...",
        help="prompt: never evict the prompt; none: evict it as other tokens (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--length", type=integer, default=900, metavar="N",
        help="tokens of a problem with its solution, about (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=integer, default=100, metavar="N",
        help="problems of each family (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-s", "--seed", type=integer, default=0, metavar="N",
        help="the same seed gives the same problems (default: %(default)s)",
    )  # fmt: skip
    add_kv_dtype(parser, "f16")
    add_archive(parser)
    add_outputs(parser)
    add_machine(parser)


def run(args: argparse.Namespace) -> int:
    """Print the measurements; write the requested files."""
    check_outputs(csv=args.csv, json=STANDARD if args.json else None)
    if wrong := [name for name in args.protect if name not in PROTECTED]:
        raise ValueError(f"protect={wrong[0]!r}, expected one of {', '.join(PROTECTED)}")
    problems = {
        family: make_problems(family, n=args.samples, length=args.length, seed=args.seed)
        for family in args.tasks
    }

    def rows() -> Iterator[Measurement]:
        for family, some in problems.items():
            yield from measure(
                args.model,
                family,
                some,
                policies=args.policy,
                budgets=args.budget,
                protects=args.protect,
                kv_dtype=args.kv_dtype,
                device=args.device,
                threads=args.threads,
                **vars(options_of(args, ArchiveOptions)),
            )

    each = 1 + len(args.policy) * len(args.budget) * len(args.protect)
    show_rows(
        args,
        rows(),
        total=len(problems) * each,
        columns=(
            *("task", "policy", "protect", "budget", "kept", "solved", "±"),
            *("of full", "±", "tokens", "loops", "tokens/s"),
        ),
        cells=_cells,
        settings={"length": args.length, "samples": args.samples, "seed": args.seed},
    )
    if shows_table(args):
        put()
        put(
            f"{args.samples} problems of each task; solved: with the right result at every step; "
            "tokens: generated, relative to the full cache; loops: outputs that end in a repetition"
        )
    return 0


def _cells(row: Measurement) -> list[str]:
    cache = [row.family, row.policy, row.protect, f"{row.budget:g}", str(row.kept)]
    if row.problems == 0:
        return [*cache, f"a prompt of {row.longest_prompt} tokens does not fit", *"-" * 6]
    errors = ["-" if isnan(e) else f"{e:.3f}" for e in (row.error, row.of_full_error)]
    return [
        *cache,
        *(f"{row.accuracy:.3f}", errors[0], f"{row.of_full:+.3f}", errors[1]),
        *(f"{row.tokens:.2f}", f"{row.loops:.0%}", f"{row.tokens_per_second:.0f}"),
    ]
