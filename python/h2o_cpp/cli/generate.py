"""Continue many prompts, from a file to a file. A job that was stopped, or killed, resumes when
it is started again: lines that the output has are not computed again."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter

from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_cpp import BUNDLED_MODEL
from h2o_cpp.cli.options import (
    add_generation,
    add_model,
    add_sequences,
    open_generator,
    stream_options,
)
from h2o_cpp.cli.parser import Parser
from h2o_cpp.jobs import Output, generate_lines


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    add_model(parser, default=BUNDLED_MODEL)
    parser.add_argument(
        "-i", "--input", type=Path, required=True, metavar="FILE", help="a JSON object in each line"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE",
        help="add a JSON object to FILE for each prompt that is done",
    )  # fmt: skip
    parser.add_argument(
        "--field", default="prompt", metavar="NAME",
        help="where the prompt is in an object (default: %(default)s)",
    )  # fmt: skip
    add_sequences(parser, "continue N prompts at once")
    parser.add_argument(
        "--json", action="store_true",
        help="print the summary line as JSON on stdout (default: in words on stderr)",
    )  # fmt: skip
    add_generation(parser)


def run(args: argparse.Namespace) -> int:
    """Write the output; progress, bad lines and a summary line go to stderr."""
    with args.input.open("rb") as file:
        n_lines = sum(bool(line.strip()) for line in file)
    n_written = n_tokens = n_bad = 0

    def report(number: int, reason: str) -> None:
        nonlocal n_bad
        n_bad += 1
        tqdm.write(f"{args.input}:{number}: {reason}", file=sys.stderr)
        bar.update()

    with (
        open_generator(args, many=True) as generator,
        Output(args.output) as output,
        tqdm(total=n_lines, initial=len(output.finished), unit=" prompts", disable=None) as bar,
    ):
        n_found = len(output.finished)
        started = perf_counter()
        for generation in generate_lines(
            generator,
            args.input,
            output,
            report=report,
            field=args.field,
            seed=args.seed,
            options=stream_options(args),
        ):
            n_written += 1
            n_tokens += generation.completion_tokens
            speed = n_tokens / (perf_counter() - started)
            bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
            bar.update()
        seconds = perf_counter() - started
    if args.json:
        document = {
            "written": n_written,
            "found": n_found,
            "bad_lines": n_bad,
            "tokens": n_tokens,
            "seconds": seconds,
        }
        print(json.dumps(document))
        return 0
    print(
        f"[{n_written} outputs written, {n_found} already done, {n_bad} bad lines | "
        f"{n_tokens} tokens, {n_tokens / seconds:.0f}/s]",
        file=sys.stderr,
    )
    return 0
