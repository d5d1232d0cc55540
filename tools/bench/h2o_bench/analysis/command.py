"""Measure the observations of the H2O paper on a model and a text (arXiv 2306.14048, section 3).

With grouped queries a row of attention is the sum over the query heads that share a KV head.

Sparsity, by layer: the share of a row below 1 % of its largest entry, masked entries not counted.

Power law, by layer: accumulated attention, sorted per head and averaged by rank; the share of all
attention that the top 5, 10 and 20 % hold; exponent and R2 of a line in log-log coordinates, from
rank n/100 to n/2. Only what exceeds "uniform", where every token attends to all before it equally,
is due to the model.

Removal: perplexity, token by token, when the cache evicts the lightest (H2O), the heaviest
(inverse) or the oldest (window); and with the first 4 tokens always kept.

Co-occurrence: whether heavy tokens are those that often occur within 5 tokens of others: the rank
correlation (Spearman), and the overlap of the top tenths beside that by chance. By position; by
position, over what uniform attention would give; and by token, summed over its places as in the
paper, which correlates for any model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_bench.analysis.attention import accumulated_attention, attention_rows
from h2o_bench.analysis.panels import draw_report
from h2o_bench.analysis.power_law import LEAST_TOKENS
from h2o_bench.analysis.report import REMOVALS, Report
from h2o_bench.analysis.sparsity import sparsity
from h2o_cpp.cli.options import add_model, add_text, add_text_tokens, add_threads
from h2o_cpp.cli.parser import Parser
from h2o_cpp.measure.perplexity import measure
from h2o_cpp.measure.plots import new_figure
from h2o_cpp.model.arguments import check_int
from h2o_cpp.model.session import open_model
from h2o_cpp.model.text_files import read_text
from h2o_cpp.model.tokenizer import Tokenizer

_MAX_TOKENS = 2048
_BUDGETS = (0.9, 0.6, 0.4, 0.2)  # kept fractions


def make_parser() -> Parser:
    parser = Parser(prog="analyze", description=__doc__)
    add_model(parser)
    add_text(parser)
    add_text_tokens(parser, f"as trained, at most {_MAX_TOKENS}")
    add_threads(parser)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers here too (default: nowhere)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw them in four panels (default: not)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables; an error ends the program with a line on stderr and status 1."""
    try:
        _run(make_parser().parse_args(argv))
    except (OSError, ValueError, MemoryError) as error:
        raise SystemExit(f"error: {error}") from None


def _run(args: argparse.Namespace) -> None:
    figure = None if args.plot is None else new_figure(10, 8)
    text = read_text(args.file)
    model = open_model(args.model, device="cpu", threads=args.threads)
    n = min(model.n_ctx_train, _MAX_TOKENS)
    n = n if args.text_tokens is None else check_int("text_tokens", args.text_tokens, 1)
    tokenizer = Tokenizer.of_model(model)
    beginning = tokenizer.encode("")
    words = tokenizer.encode(text, add_special=False)[: n - len(beginning)]
    tokens = [*beginning, *words]
    if len(tokens) < LEAST_TOKENS:
        raise ValueError(f"the text has {len(tokens)} tokens, expected at least {LEAST_TOKENS}")

    accumulated = accumulated_attention(model, tokens)
    rows = attention_rows(model, tokens)
    rows = tqdm(rows, total=len(tokens), desc="rows", disable=None, leave=False)
    layer_sparsity = sparsity(rows)
    measured = measure(
        model,
        words,
        policies=list(REMOVALS),
        budgets=_BUDGETS,
        n_ctx=len(tokens),
        beginning=beginning,
    )
    n_measured = 1 + len(REMOVALS) * len(_BUDGETS)
    removal = list(tqdm(measured, total=n_measured, desc="removal", disable=None, leave=False))
    report = Report.of(tokens, layer_sparsity, accumulated, removal)

    print(f"{len(tokens)} tokens of {args.file}\n")
    print("\n".join(report.lines()))
    if model.n_kv_heads < model.n_heads:
        group = model.n_heads // model.n_kv_heads
        print(f"\nA row of attention is the sum over the {group} query heads of a KV head.")
    if args.json is not None:
        args.json.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    if figure is not None:
        draw_report(figure, report)
        figure.savefig(args.plot)
