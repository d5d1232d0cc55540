"""The command line of the converter: `tools/convert`, `h2o-cpp convert`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from h2o_cpp.convert.conversion import OUTTYPES, convert


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the converter's arguments to a parser, be it the main one or a subcommand's."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT_DIR",
        help="directory of a Hugging Face checkpoint (config.json, weights, tokenizer)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the GGUF file to write (default: CHECKPOINT_DIR's name and the type, here)",
    )
    parser.add_argument(
        "--outtype",
        choices=list(OUTTYPES),
        default="f16",
        help="type of the weight matrices (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Converts as the parsed arguments say; the exit status is 0, 1 (error) or 130 (interrupt)."""
    checkpoint: Path = args.checkpoint
    outtype: str = args.outtype
    output: Path = args.output or Path(f"{checkpoint.resolve().name}-{outtype.upper()}.gguf")
    try:
        convert(checkpoint, output, outtype)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: {output} was not written", file=sys.stderr)
        return 130
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the given arguments (default: sys.argv)."""
    parser = argparse.ArgumentParser(
        prog="convert", description="Converts a Hugging Face checkpoint to GGUF."
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))
