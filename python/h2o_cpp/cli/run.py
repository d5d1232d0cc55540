"""Continue a text. A summary on stderr shows the speed and the size of the cache."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from h2o_cpp import Generator
from h2o_cpp.cli.option_names import with_limit_names
from h2o_cpp.cli.options import (
    add_generation,
    add_prompt,
    open_generator,
    read_prompt,
    stream_options,
)
from h2o_cpp.cli.output import mebibytes, put, put_json, put_text, tell
from h2o_cpp.cli.parser import Parser
from h2o_cpp.cli.progress import reading
from h2o_cpp.generation.request import StreamOptions
from h2o_cpp.generation.stats import Stats
from h2o_cpp.generation.stream import Stream


def add_arguments(parser: Parser) -> None:
    add_prompt(parser, "PROMPT", "the text to continue")
    parser.add_argument(
        "--parse-special",
        action="store_true",
        help='parse special tokens in the text, such as "</s>" (default: they are ordinary text)',
    )
    parser.add_argument(
        "--no-display-prompt",
        action="store_true",
        help="print only what follows PROMPT (default: PROMPT too)",
    )
    parser.add_argument(
        "--json", action="store_true",
        help="print one JSON object at the end, with the text and the numbers of the summary "
        "(default: the text as it comes)",
    )  # fmt: skip
    add_generation(parser)


def run(args: argparse.Namespace) -> int:
    """Stream to stdout; the summary goes to stderr, so that a pipe carries only text."""
    prompt = read_prompt(args)
    options: StreamOptions = {**stream_options(args), "parse_special": args.parse_special}
    with open_generator(args) as generator:
        stream = generator.stream(prompt, **options)
        if args.json:
            status = _read(stream)
            put_json(_document(generator, stream, prompt))
            return status
        if not args.no_display_prompt:
            put_text(prompt)
        return show(generator, stream)


def _read(stream: Stream, write: Callable[[str], object] = lambda piece: None) -> int:
    """Read a stream to its end; Ctrl-C ends it with status 130."""
    with stream, reading(stream) as ended:
        try:
            for piece in stream:
                ended()
                write(piece)
        except KeyboardInterrupt:
            return 130
    return 0


def _document(generator: Generator, stream: Stream, prompt: str) -> dict[str, object]:
    """The text and the numbers of summary() as JSON."""
    stats = generator.stats()
    return {
        "prompt": prompt,
        "text": stream.text,
        "finish_reason": stream.finish_reason,
        "prompt_tokens": stream.prompt_tokens,
        "prompt_tokens_per_second": stream.prompt_tokens_per_second,
        "generated_tokens": len(stream.tokens),
        "tokens_per_second": stream.tokens_per_second,
        "cache_bytes": stats.cache_bytes,
        "full_cache_bytes": stats.full_cache_bytes,
        "draft_bytes": stats.draft_bytes,
        "archive_bytes": stats.archive_bytes,
        "tokens_seen": stats.tokens_seen,
        "evictions": stats.evictions,
        "clamped": stats.clamped,
    }


def show(generator: Generator, stream: Stream) -> int:
    """Print a stream and a summary; Ctrl-C ends it with status 130."""
    status = _read(stream, put_text)
    put()
    tell(summary(generator, stream))
    return status


def cache_size(stats: Stats) -> str:
    """The bytes of the cache and of a full one."""
    size, full = stats.cache_bytes, stats.full_cache_bytes
    return f"cache {mebibytes(size)}, full {mebibytes(full)} ({size / full:.0%})"


def summary(generator: Generator, stream: Stream) -> str:
    """One line: speed of prompt and generation, bytes of the cache and of a full one, evictions,
    and numbers that the cache could not store.
    """
    stats = generator.stats()
    end = with_limit_names(stream.finish_message or str(stream.finish_reason))
    archive = f", archive {mebibytes(stats.archive_bytes)}" if stats.archive_bytes else ""
    drafts = f", drafts {mebibytes(stats.draft_bytes)}" if stats.draft_bytes else ""
    clamped = f", {stats.clamped} too large for --kv-dtype" if stats.clamped else ""
    return (
        f"[prompt {stream.prompt_tokens} tokens, {stream.prompt_tokens_per_second:.0f}/s | "
        f"generated {len(stream.tokens)} tokens, {stream.tokens_per_second:.0f}/s | "
        f"{cache_size(stats)}{archive}{drafts}{clamped} | "
        f"{stats.evictions} evicted of {stats.tokens_seen} | "
        f"end: {end}]"
    )
