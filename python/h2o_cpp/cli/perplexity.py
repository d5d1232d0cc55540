"""Measure the perplexity of a text under eviction, with every policy at every budget."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from math import isnan, nan

from h2o_cpp.arguments import check_context, check_int
from h2o_cpp.cli.argument_types import integer
from h2o_cpp.cli.cache_options import add_n_batch, add_n_ctx
from h2o_cpp.cli.comparison import (
    add_budgets,
    add_comparison,
    comparison_of,
    open_figure,
    show_rows,
    shows_table,
)
from h2o_cpp.cli.files import read_text
from h2o_cpp.cli.options import add_model, add_text, add_text_tokens
from h2o_cpp.cli.output import cache_text, put
from h2o_cpp.cli.parser import Parser
from h2o_cpp.measure.perplexity import N_SEGMENTS, Measurement, measure
from h2o_cpp.measure.plots import draw_budgets
from h2o_cpp.model.session import open_model
from h2o_cpp.model.tokenizer import Tokenizer


def add_arguments(parser: Parser) -> None:
    add_model(parser)
    add_text(parser)
    add_budgets(parser, [0.04, 0.1, 0.2, 0.4, 0.6])
    add_n_ctx(parser, "tokens of a window", "as trained, at most 4096")
    parser.add_argument(
        "--stride", type=integer, metavar="N",
        help="predict the last N tokens of each window (default: all but the first)",
    )  # fmt: skip
    add_n_batch(
        parser, 1, "tokens per chunk, each followed by eviction (default: 1, as in decode)",
        "--chunk",
    )  # fmt: skip
    add_text_tokens(parser, "all")
    parser.add_argument(
        "--streaming", action="store_true",
        help="read the text in one pass, and show each tenth of it (default: in windows)",
    )  # fmt: skip
    parser.add_argument(
        "--agreement", action="store_true",
        help="also compare all predictions with the full cache: the share with the same most "
        "likely token, and the overlap of the probabilities, the sum of min(p, q) (default: no)",
    )  # fmt: skip
    add_comparison(parser, "plot perplexity against budget (default: no)")


def run(args: argparse.Namespace) -> int:
    """Print the measurements; write the requested files."""
    figure = open_figure(args, 6)
    if args.text_tokens is not None:
        check_int("text_tokens", args.text_tokens, 1)
    text = read_text(args.file)
    model = open_model(args.model, device="cpu", threads=args.threads)
    n_ctx = check_context(args.n_ctx, model.n_ctx_train)
    tokenizer = Tokenizer.of_model(model)
    rows = measure(
        model,
        tokenizer.encode(text, add_special=False)[: args.text_tokens],
        comparison_of(args, n_ctx),
        beginning=tokenizer.encode(""),
        stride=args.stride,
        streaming=args.streaming,
        agreement=args.agreement,
    )
    full = nan  # until it is measured, unless it cannot be

    def cells(row: Measurement) -> list[str]:
        nonlocal full
        full = row.perplexity if row.policy == "full" else full
        of_full = "-" if isnan(full) else f"{row.perplexity / full:.3f}"
        return [
            *(row.policy, f"{row.budget:g}", str(row.kept), f"{row.perplexity:.3f}"),
            *(of_full, cache_text(row.cache_bytes, row.archive_bytes)),
            *(f"{value:.3f}" for value in row.agreement or ()),
            *(f"{value:.3f}" for value in row.segments),
        ]

    columns = ["policy", "budget", "kept", "perplexity", "of full", "cache"]
    columns += ["same token", "overlap"] if args.agreement else []
    measured = show_rows(
        args,
        rows,
        total=len(args.policy) * len(args.budget) + 1,
        columns=columns + [str(i + 1) for i in range(N_SEGMENTS if args.streaming else 0)],
        cells=cells,
        settings={"n_ctx": n_ctx, "n_batch": args.n_batch},
        csv_row=_flat,
    )
    if shows_table(args):
        how = "one pass; 1 to 10 are its tenths" if args.streaming else f"windows of {n_ctx}"
        put()
        put(f"{measured[0].tokens} tokens predicted, in {how}, {args.n_batch} at a time")
        if isnan(full):
            put(f"the full cache is not measured: the text is longer than n-ctx, {n_ctx}")
    if figure is not None:
        axes = figure.subplots()
        evicting = [row for row in measured if row.policy != "full"]
        points = [(row.policy, row.budget, row.perplexity) for row in evicting]
        draw_budgets(axes, points, full)
        axes.set_ylabel("perplexity")
        figure.savefig(args.plot)
    return 0


def _flat(row: Measurement) -> dict[str, object]:
    """A row of the CSV file, with a column for each segment and kind of agreement."""
    flat = asdict(row)
    segments, agreement = flat.pop("segments"), flat.pop("agreement")
    flat |= {} if agreement is None else agreement._asdict()
    return flat | {f"segment_{i + 1}": value for i, value in enumerate(segments)}
