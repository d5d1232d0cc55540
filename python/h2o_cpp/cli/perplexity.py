"""Measure the perplexity of a text under eviction: every policy at every budget, at equal slots."""

from __future__ import annotations

import argparse
import csv
from dataclasses import asdict, fields
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_cpp import _core
from h2o_cpp.arguments import whole
from h2o_cpp.cli.info import mebibytes
from h2o_cpp.cli.options import add_kv_dtype, add_threads, read_text
from h2o_cpp.perplexity import POLICIES, Measurement, measure
from h2o_cpp.tokenizer import TextTokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="GGUF file")
    parser.add_argument("text", type=Path, metavar="FILE", help="UTF-8 text")
    parser.add_argument(
        "--policy", type=_names, default=list(POLICIES), metavar="NAME,...",
        help=f"of {','.join(POLICIES)} (default: all); the full cache is always measured",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=_fractions, default=[0.04, 0.1, 0.2, 0.4, 0.6], metavar="X,...",
        help="fractions of n-ctx that are kept (default: 0.04,0.1,0.2,0.4,0.6)",
    )  # fmt: skip
    parser.add_argument(
        "-c", "--n-ctx", type=int, metavar="N", help="tokens of a window (default: as trained)"
    )
    parser.add_argument(
        "--stride", type=int, metavar="N",
        help="predict the last N tokens of each window (default: all but the first)",
    )  # fmt: skip
    parser.add_argument(
        "--chunk", type=int, default=1, metavar="N",
        help="tokens fed at a time, with eviction after each (default: 1, as generation does)",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="read only N tokens of the text (default: all)"
    )
    add_kv_dtype(parser)
    add_threads(parser)
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write the table here too (default: nowhere)"
    )


def run(args: argparse.Namespace) -> int:
    """Print a table, a row as soon as it is measured."""
    text = read_text(args.text)
    n_threads = 0 if args.threads is None else whole("threads", args.threads, 1)
    model = _core.Model(args.model, device="cpu", threads=n_threads)
    n_ctx = model.n_ctx_train if args.n_ctx is None else args.n_ctx
    tokenizer = TextTokenizer.of_model(model)
    beginning = tokenizer.encode("")
    tokens = tokenizer.encode(text, add_special=False)[: args.max_tokens]
    rows = measure(
        model,
        tokens,
        policies=args.policy,
        budgets=args.budget,
        n_ctx=n_ctx,
        beginning=beginning,
        stride=args.stride,
        chunk=args.chunk,
        kv_dtype=args.kv_dtype,
    )
    print("| policy | budget | kept | perplexity | of full | cache |")
    print("|---|---|---|---|---|---|")
    measured: list[Measurement] = []
    total = 1 + len(args.policy) * len(args.budget)
    for row in tqdm(rows, total=total, disable=None, leave=False):
        measured.append(row)
        tqdm.write(
            f"| {row.policy} | {row.budget:g} | {row.kept} | {row.perplexity:.3f} "
            f"| {row.perplexity / measured[0].perplexity:.3f} | {mebibytes(row.cache_bytes)} |"
        )
    print(f"\n{measured[0].tokens} tokens predicted, in windows of {n_ctx}, {args.chunk} at a time")
    if args.csv is not None:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Measurement)])
            writer.writeheader()
            writer.writerows(map(asdict, measured))
    return 0


def _names(text: str) -> list[str]:
    return text.split(",")


def _fractions(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError("expected fractions such as 0.1,0.2") from None
