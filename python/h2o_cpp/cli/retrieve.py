"""Measure how well facts in a prompt are found under eviction, with every policy and budget."""

from __future__ import annotations

import argparse
from math import isnan
from pathlib import Path

from h2o_cpp.arguments import check_context, check_int
from h2o_cpp.cli.argument_types import integer, names
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
from h2o_cpp.cli.options import add_model
from h2o_cpp.cli.output import put
from h2o_cpp.cli.parser import Parser
from h2o_cpp.measure.plots import draw_budgets
from h2o_cpp.measure.retrieval.measurement import Measurement, measure
from h2o_cpp.measure.retrieval.tasks import FILLER, TASKS, make_samples, read_samples
from h2o_cpp.model.session import open_model
from h2o_cpp.model.tokenizer import Tokenizer

_LENGTH = 512


def add_arguments(parser: Parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--tasks", "--task", type=names, default=list(TASKS), metavar="NAME,...",
        help=f"tasks, of {', '.join(TASKS)} (default: all)",
    )  # fmt: skip
    add_budgets(parser, [0.1, 0.2, 0.4])
    add_n_ctx(
        parser, "tokens of a prompt with its answer", f"as trained, at most {_LENGTH}", "--length"
    )  # fmt: skip
    parser.add_argument(
        "--samples",
        type=integer,
        default=20,
        metavar="N",
        help="samples per task (default: %(default)s)",
    )
    add_n_batch(
        parser, 32, "prompt tokens per chunk, each followed by eviction (default: %(default)s)",
        "--chunk",
    )  # fmt: skip
    parser.add_argument(
        "-s", "--seed", type=integer, default=0, metavar="N",
        help="the same seed gives the same prompts (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-f", "--file", "--text", type=Path, metavar="FILE",
        help="UTF-8 text that fills the prompts (default: a repeated paragraph)",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=Path, metavar="FILE",
        help="samples of the task kv: on each line a JSON object with context and answer "
        "(default: random)",
    )  # fmt: skip
    parser.add_argument(
        "--question-apart", action="store_true",
        help="evict before the question is read, as if the text had been read in advance "
        "(default: the question is part of the prompt)",
    )  # fmt: skip
    add_comparison(parser, "plot log-likelihood against budget, one panel per task (default: no)")


def run(args: argparse.Namespace) -> int:
    """Print the measurements; write the requested files."""
    if args.data is not None and "kv" not in args.tasks:
        raise ValueError(f"data={str(args.data)!r} has samples of kv, expected kv among --tasks")
    figure = open_figure(args, 5 * len(args.tasks))
    filler = FILLER if args.file is None else read_text(args.file)
    n_samples = check_int("samples", args.samples, 1)
    model = open_model(args.model, device="cpu", threads=args.threads)
    length = check_context(args.n_ctx, model.n_ctx_train, _LENGTH)
    tokenizer = Tokenizer.of_model(model)
    tasks = {
        task: read_samples(tokenizer, args.data, n_samples)
        if task == "kv" and args.data is not None
        else make_samples(
            tokenizer, task, n=n_samples, length=length, filler=filler, seed=args.seed
        )
        for task in args.tasks
    }
    rows = measure(model, tasks, comparison_of(args, length), question_apart=args.question_apart)
    measured = show_rows(
        args,
        rows,
        total=len(tasks) * (2 + len(args.policy) * len(args.budget)),
        columns=(
            *("task", "policy", "budget", "kept", "log-likelihood"),
            *("of full", "error", "exact", "samples"),
        ),
        cells=_cells,
        settings={"length": length, "n_batch": args.n_batch},
    )
    if shows_table(args):
        put()
        put(
            f"prompts of up to {length} tokens, read {args.n_batch} at a time; "
            "log-likelihood of a token of the answer, in nats"
        )
    if figure is not None:
        panels = figure.subplots(1, len(tasks), squeeze=False)[0]
        for axes, task in zip(panels, tasks, strict=True):
            full, absent, *rest = (row for row in measured if row.task == task)
            points = [(row.policy, row.budget, row.log_likelihood) for row in rest]
            axes.axhline(absent.log_likelihood, linestyle=":", color="black", label="absent")
            draw_budgets(axes, points, full.log_likelihood)
            axes.set(title=task, ylabel="log-likelihood of a token, nats")
        figure.savefig(args.plot)
    return 0


def _cells(row: Measurement) -> list[str]:
    error = "-" if isnan(row.error) else f"{row.error:.3f}"  # of one sample
    return [
        *(row.task, row.policy, f"{row.budget:g}", str(row.kept), f"{row.log_likelihood:.3f}"),
        *(f"{row.of_full:+.3f}", error, f"{row.exact:.0%}", str(row.samples)),
    ]
