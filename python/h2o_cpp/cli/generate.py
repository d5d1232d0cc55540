"""Continue many prompts, from a file to a file. Repeat the command to resume a job that was stopped
or killed: finished lines are not computed again.

A line of the input is a JSON object: {"prompt": "The old man", "id": 7, "max_tokens": 50}. Its
options, named as in Python, apply to this line; "id" and "metadata" are copied to the output,
and other fields ignored. Invalid lines, also those with a misspelled option, are reported and
skipped, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter

from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_cpp import Generator
from h2o_cpp.cli.cache_options import add_sequences
from h2o_cpp.cli.files import STANDARD
from h2o_cpp.cli.options import add_generation, add_model, open_generator, stream_options
from h2o_cpp.cli.output import put_json, tell
from h2o_cpp.cli.parser import Parser
from h2o_cpp.cli.sampling import changed_sampling, form_options
from h2o_cpp.files.visible_text import message_line
from h2o_cpp.jobs import Output, StdoutOutput, generate_lines
from h2o_cpp.options import CacheOptions, option_names

# An output depends on these, besides its line, the model and options of the cache.
_SETTINGS = (
    *("field", "max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty"),
    *("repeat_last_n", "seed", "stop", "ignore_eos", "protect"),
)


def add_arguments(parser: Parser) -> None:
    add_model(parser, bundled=True)
    parser.add_argument(
        "-i", "--input", type=Path, required=True, metavar="FILE",
        help='a JSON object in each line; "-" is stdin',
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE",
        help='append a JSON object to FILE for each finished prompt; "-" is stdout',
    )  # fmt: skip
    parser.add_argument(
        "--allow-other-options", action="store_true",
        help="resume an output of another model, other options or other inputs (default: refuse)",
    )  # fmt: skip
    parser.add_argument(
        "--field", default="prompt", metavar="NAME",
        help="key of the prompt in a line's object (default: %(default)s)",
    )  # fmt: skip
    add_sequences(parser, "continue N prompts at once")
    parser.add_argument(
        "--json", action="store_true",
        help="print the summary line as JSON on stdout (default: in words on stderr)",
    )  # fmt: skip
    add_generation(parser)


def run(args: argparse.Namespace) -> int:
    """Write the output; progress, invalid lines and a summary go to stderr."""
    if args.json and args.output == STANDARD:
        raise ValueError("--json and --output would write to stdout, give a file")
    n_lines = _count_lines(args.input)
    name = "stdin" if args.input == STANDARD else args.input
    n_written = n_tokens = n_bad = 0

    def report(number: int, reason: str) -> None:
        nonlocal n_bad
        n_bad += 1
        tqdm.write(message_line(f"{name}:{number}: {reason}"), file=sys.stderr)
        bar.update()

    with (
        _open_input(args.input) as lines,
        open_generator(args) as generator,
        _open_output(args, generator) as output,
        tqdm(total=n_lines, initial=len(output.finished), unit=" prompts", disable=None) as bar,
    ):
        n_found = len(output.finished)
        started = perf_counter()
        for generation in generate_lines(
            generator,
            lines,
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
    status = 1 if n_bad else 0
    if args.json:
        document = {
            "written": n_written,
            "found": n_found,
            "bad_lines": n_bad,
            "tokens": n_tokens,
            "seconds": seconds,
        }
        put_json(document, indent=None)
        return status
    tell(
        f"[{n_written} outputs written, {n_found} already done, {n_bad} bad lines | "
        f"{n_tokens} tokens, {n_tokens / seconds:.0f}/s]",
    )
    return status


def _count_lines(path: Path) -> int | None:
    """The number of non-empty lines of a file; None for stdin."""
    if path == STANDARD:
        return None
    with path.open("rb") as file:
        return sum(bool(line.strip()) for line in file)


def _open_input(path: Path) -> AbstractContextManager[Iterable[bytes]]:
    return nullcontext(sys.stdin.buffer) if path == STANDARD else path.open("rb")


def _open_output(args: argparse.Namespace, generator: Generator) -> Output | StdoutOutput:
    if args.output == STANDARD:
        return StdoutOutput()
    cache = {*option_names(CacheOptions)} - {"archive_dir"}
    settings = {name: getattr(args, name) for name in (*cache, *_SETTINGS)}
    if args.exact:
        settings["exact"] = True
    return Output(
        args.output,
        {"model": generator.path.name, **settings, **changed_sampling(args), **form_options(args)},
        allow_other_options=args.allow_other_options,
    )
