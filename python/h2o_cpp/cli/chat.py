"""Converse with a model, a line at a time; Ctrl-C stops an answer.

The line /reset begins anew, /exit (or Ctrl-D) ends the conversation.
"""

from __future__ import annotations

import argparse
import sys

from h2o_cpp.chat import Chat
from h2o_cpp.cli.options import add_options, open_generator, read_template, stream_options
from h2o_cpp.cli.run import show
from h2o_cpp.request import ContextFullError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--system", metavar="TEXT", help="what the model is told first (default: nothing)"
    )
    parser.add_argument(
        "--template",
        metavar="TEXT",
        help="Jinja2 chat template, or @FILE that holds one (default: the model's own)",
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answer each line of stdin on stdout; each answer's closing line goes to stderr.

    A line that cannot be answered is an error, and the status 1 at the end; the conversation goes
    on as if it had not been said.
    """
    template = read_template(args.template)
    prompt = "> " if sys.stdin.isatty() else ""
    status = 0
    with open_generator(args) as generator:
        chat = Chat(generator, system=args.system, template=template)
        options = stream_options(args)
        while True:
            try:
                text = input(prompt)
            except EOFError:
                return status
            match text.strip():
                case "":
                    continue
                case "/exit":
                    return status
                case "/reset":
                    chat = Chat(generator, system=args.system, template=template)
                    continue
            try:
                show(generator, chat.say(text, **options))
            except ContextFullError as error:
                status = 1
                print(f"error: {error}: say less, or /reset to begin anew", file=sys.stderr)
            except ValueError as error:
                status = 1
                print(f"error: {error}", file=sys.stderr)
