"""Quantize a GGUF file: write the same model with fewer bits per weight."""

from __future__ import annotations

import argparse
from pathlib import Path

from h2o_cpp.cli.argument_types import gguf_output
from h2o_cpp.cli.options import add_force, add_threads
from h2o_cpp.cli.output import mebibytes, tell
from h2o_cpp.cli.parser import Parser
from h2o_cpp.quantize import MIXES, quantize


def add_arguments(parser: Parser) -> None:
    parser.add_either(
        "-m",
        "--model",
        metavar="MODEL",
        help="GGUF file, best of type F32, F16 or BF16; of a split model the first part",
    )
    parser.add_argument("output", type=gguf_output, metavar="OUT", help="the GGUF file to write")
    parser.add_argument("type", metavar="TYPE", help=f"one of {', '.join(MIXES)}")
    add_threads(parser)
    parser.add_argument(
        "--imatrix",
        type=Path,
        metavar="FILE",
        help="importance matrix of the model, by h2o-cpp imatrix or llama.cpp (default: none)",
    )
    parser.add_argument(
        "--allow-requantize",
        action="store_true",
        help="accept tensors that are already quantized to fewer than 8 bits (default: refuse)",
    )
    add_force(parser)


def run(args: argparse.Namespace) -> int:
    quantize(
        args.model,
        args.output,
        args.type,
        threads=args.threads,
        allow_requantize=args.allow_requantize,
        imatrix=args.imatrix,
        overwrite=args.force,
    )
    tell(f"wrote {args.output} ({mebibytes(args.output.stat().st_size)})")
    return 0
