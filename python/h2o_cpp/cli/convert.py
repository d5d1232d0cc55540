"""Convert a Hugging Face checkpoint (config.json, weights, tokenizer) to one GGUF file."""

from __future__ import annotations

import argparse
from pathlib import Path

from h2o_cpp.cli.argument_types import gguf_output
from h2o_cpp.cli.options import add_force
from h2o_cpp.cli.output import mebibytes, tell
from h2o_cpp.cli.parser import Parser
from h2o_cpp.convert import OUTTYPES, convert


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT_DIR",
        help="directory of a Hugging Face checkpoint",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=gguf_output,
        metavar="FILE",
        help="the GGUF file to write (default: CHECKPOINT_DIR-TYPE.gguf in the current directory)",
    )
    parser.add_argument(
        "--outtype",
        choices=list(OUTTYPES),
        default="f16",
        help="type of the weight matrices (default: %(default)s)",
    )
    add_force(parser)


def run(args: argparse.Namespace) -> int:
    checkpoint: Path = args.checkpoint
    outtype: str = args.outtype
    if checkpoint.is_file() and checkpoint.suffix == ".gguf":
        raise ValueError(
            f"{checkpoint}: GGUF already, expected a checkpoint's directory; run it with h2o-cpp "
            f"run -m {checkpoint}, or make it smaller with h2o-cpp quantize {checkpoint}"
        )
    output: Path = args.output or Path(f"{checkpoint.resolve().name}-{outtype.upper()}.gguf")
    notes = convert(checkpoint, output, outtype, overwrite=args.force)
    tell(f"wrote {output} ({mebibytes(output.stat().st_size)})")
    for note in notes:
        tell(f"note: {note}")
    return 0
