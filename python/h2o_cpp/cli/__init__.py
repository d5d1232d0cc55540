"""The command line of h2o-cpp, one module for each command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from h2o_cpp import __version__
from h2o_cpp.cli import (
    advise,
    analyze,
    bench,
    chat,
    convert,
    eval,
    generate,
    info,
    inspect,
    perplexity,
    quantize,
    retrieve,
    run,
    serve,
)


class _Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


_COMMANDS: dict[str, tuple[_Command, str]] = {
    "run": (run, "continue a text"),
    "generate": (generate, "continue many prompts, from a file to a file"),
    "chat": (chat, "converse with a model"),
    "serve": (serve, "serve a model to OpenAI's clients, and a page"),
    "info": (info, "describe a GGUF file"),
    "convert": (convert, "convert a Hugging Face checkpoint to GGUF"),
    "quantize": (quantize, "make a GGUF file smaller"),
    "inspect": (inspect, "show what the cache kept of a text"),
    "advise": (advise, "find the smallest cache that costs little on a text"),
    "perplexity": (perplexity, "measure what eviction costs on a text"),
    "analyze": (analyze, "see how attention is spread over a text"),
    "retrieve": (retrieve, "see what eviction loses of a prompt"),
    "bench": (bench, "measure how fast a model file is"),
    "eval": (eval, "score a model on benchmark tasks under eviction"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 after an error, 130 after Ctrl-C. Usage errors exit 2."""
    parser = argparse.ArgumentParser(
        prog="h2o-cpp",
        description="LLM inference with a bounded, heavy-hitter (H2O) KV cache.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in _COMMANDS.items():
        module.add_arguments(
            commands.add_parser(name, help=summary, description=module.__doc__, allow_abbrev=False)
        )
    args = parser.parse_args(argv)
    module, _ = _COMMANDS[args.command]
    try:
        return module.run(args)
    except BrokenPipeError:  # the reader of our output has left; nobody is to hear of the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
