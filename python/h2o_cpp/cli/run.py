"""Continue a text as a stream; say at the end how fast it was and how much the cache held."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from h2o_cpp import Generator
from h2o_cpp.cli.info import mebibytes
from h2o_cpp.cli.options import add_options, open_generator, read_prompt, stream_options
from h2o_cpp.stream import Stream, StreamOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help='the text to continue; "-" reads stdin'
    )
    prompt.add_argument(
        "-f", "--file", type=Path, metavar="FILE", help="read the text to continue from FILE"
    )
    parser.add_argument(
        "--parse-special",
        action="store_true",
        help='special tokens that the text spells, as "</s>", are those tokens (default: text)',
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Stream to stdout; the closing line goes to stderr, so that a pipe holds nothing but text."""
    prompt = read_prompt(args.prompt, args.file)
    options: StreamOptions = {**stream_options(args), "parse_special": args.parse_special}
    with open_generator(args) as generator:
        stream = generator.stream(prompt, **options)
        print(prompt, end="", flush=True)
        return show(generator, stream)


def show(generator: Generator, stream: Stream) -> int:
    """Print a stream and a closing line; Ctrl-C ends it and is the status 130."""
    status = 0
    with stream:
        try:
            for piece in stream:
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            status = 130
    print(flush=True)
    print(summary(generator, stream), file=sys.stderr)
    return status


def summary(generator: Generator, stream: Stream) -> str:
    """One line: speed of prompt and generation, cache bytes beside the full cache's, evictions."""
    stats = generator.stats()
    share = stats.cache_bytes / stats.full_cache_bytes
    return (
        f"[prompt {stream.prompt_tokens} tokens, {stream.prompt_tokens_per_second:.0f}/s | "
        f"generated {len(stream.tokens)} tokens, {stream.tokens_per_second:.0f}/s | "
        f"cache {mebibytes(stats.cache_bytes)}, full {mebibytes(stats.full_cache_bytes)} "
        f"({share:.0%}) | {stats.evictions} evicted of {stats.tokens_seen} | "
        f"end: {stream.finish_message or stream.finish_reason}]"
    )
