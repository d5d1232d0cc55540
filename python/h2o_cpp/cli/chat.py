"""Converse with a model, a line at a time; Ctrl-D ends it, Ctrl-C stops an answer."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from h2o_cpp.chat import Chat
from h2o_cpp.cli.options import add_options, open_generator, stream_options
from h2o_cpp.cli.run import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument(
        "--template",
        metavar="TEXT",
        help="Jinja2 chat template, or @FILE that holds one (default: the model's own)",
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answer each line of stdin on stdout; each answer's closing line goes to stderr."""
    template: str | None = args.template
    if template is not None and template.startswith("@"):
        template = Path(template[1:]).read_text(encoding="utf-8")
    prompt = "> " if sys.stdin.isatty() else ""
    with open_generator(args) as generator:
        chat = Chat(generator, system=args.system, template=template)
        options = stream_options(args)
        while True:
            try:
                text = input(prompt)
            except EOFError:
                return 0
            if text.strip():
                show(generator, chat.say(text, **options))
