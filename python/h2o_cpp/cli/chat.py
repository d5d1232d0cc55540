"""Converse with a model; Ctrl-C stops an answer, Ctrl-D ends the conversation.

A line is a message; one of several lines begins and ends with three double quotes. Lines that begin
with / are commands: /help, /budget, /stats, /inspect, /save, /load, /reset, /exit.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path

from h2o_cpp import BUNDLED_MODEL
from h2o_cpp.cli.conversation import COMMANDS, Conversation
from h2o_cpp.cli.line_editor import editing, history_file, is_quoted, messages, unquoted
from h2o_cpp.cli.options import add_generation, add_model
from h2o_cpp.cli.parser import Parser
from h2o_cpp.cli.run import show
from h2o_cpp.generation.request import ContextFullError


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    add_model(parser, default=BUNDLED_MODEL)
    parser.add_argument(
        "--system",
        "-sys",
        "--system-prompt",
        metavar="TEXT",
        help="what the model is told first (default: nothing)",
    )
    parser.add_argument(
        "--template",
        metavar="TEXT",
        help="Jinja2 chat template, or @FILE that holds one (default: the model's own)",
    )
    history = parser.add_mutually_exclusive_group()
    history.add_argument(
        "--history", type=Path, metavar="FILE",
        help="where a terminal's lines are remembered (default: ~/.local/state/h2o-cpp/history)",
    )  # fmt: skip
    history.add_argument(
        "--no-history", action="store_true", help="forget them at the end (default: remember)"
    )
    add_generation(parser)


def run(args: argparse.Namespace) -> int:
    """Answer each message of stdin on stdout; all else goes to stderr.

    A message that cannot be answered, or a command that cannot be obeyed, is an error, and the
    status 1 at the end; the conversation goes on as if it had not been said.
    """
    status = 0
    history = None if args.no_history else args.history or history_file()
    with closing(Conversation(args)) as conversation, editing(history, list(COMMANDS)):
        try:
            for text in messages():
                if not text.strip():
                    continue
                if not _obey_or_answer(conversation, text):
                    status = 1
        except EOFError:  # /exit
            pass
        except ValueError as error:  # of a message that has no end
            _tell_error(error)
            return 1
    return status


def _obey_or_answer(conversation: Conversation, text: str) -> bool:
    """Whether it could be done."""
    try:
        if not is_quoted(text) and text.lstrip().startswith("/"):
            conversation.command(text)
        else:
            show(conversation.generator, conversation.say(unquoted(text)))
    except ContextFullError as error:
        _tell_error(f"{error}: say less, or /reset to begin anew")
    except BrokenPipeError:
        raise
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        _tell_error(error)
    else:
        return True
    return False


def _tell_error(error: object) -> None:
    print(f"error: {error}", file=sys.stderr)
