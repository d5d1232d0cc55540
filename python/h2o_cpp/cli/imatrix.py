"""Measure how important the columns of each weight are on a text, for `quantize --imatrix`."""

from __future__ import annotations

import argparse
from pathlib import Path

from h2o_cpp.cli.argument_types import gguf_output, integer
from h2o_cpp.cli.cache_options import add_n_ctx
from h2o_cpp.cli.files import read_text
from h2o_cpp.cli.options import add_force, add_model, add_text, add_threads
from h2o_cpp.cli.output import tell
from h2o_cpp.cli.parser import Parser
from h2o_cpp.quantize import make_imatrix


def add_arguments(parser: Parser) -> None:
    add_model(parser)
    add_text(parser)
    parser.add_argument(
        "-o", "--output", type=gguf_output, metavar="FILE", default=Path("imatrix.gguf"),
        help="the importance matrix to write (default: %(default)s)",
    )  # fmt: skip
    add_n_ctx(parser, "tokens per chunk of the text", "512")
    parser.add_argument(
        "--chunks", type=integer, metavar="N",
        help="read at most N chunks (default: the whole text)",
    )  # fmt: skip
    add_threads(parser)
    add_force(parser)


def run(args: argparse.Namespace) -> int:
    n_tokens = make_imatrix(
        args.model,
        read_text(args.file),
        args.output,
        n_ctx=512 if args.n_ctx is None else args.n_ctx,
        n_chunks=args.chunks,
        threads=args.threads,
        overwrite=args.force,
    )
    tell(f"wrote {args.output}, measured on {n_tokens} tokens")
    return 0
