"""Chat with a model; Ctrl-C stops a reply, Ctrl-D ends the program.

Each line is a message; a message of several lines begins and ends with three double quotes. Lines
that begin with / are commands: /help, /budget, /stats, /inspect, /save, /load, /reset, /exit.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path

from h2o_cpp import BUNDLED_MODEL
from h2o_cpp.cli.conversation import COMMANDS, Conversation
from h2o_cpp.cli.files import error_text
from h2o_cpp.cli.line_editor import editing, history_file, is_quoted, messages, unquoted
from h2o_cpp.cli.option_names import with_limit_names
from h2o_cpp.cli.options import add_generation, add_model, add_template
from h2o_cpp.cli.parser import Parser
from h2o_cpp.cli.run import show
from h2o_cpp.generation.request import ContextFullError


def add_arguments(parser: Parser) -> None:
    add_model(parser, bundled=True)
    parser.add_argument(
        "--system",
        "-sys",
        "--system-prompt",
        metavar="TEXT",
        help="the system prompt (default: none)",
    )
    add_template(parser)
    history = parser.add_mutually_exclusive_group()
    history.add_argument(
        "--history", type=Path, metavar="FILE",
        help="file that stores the lines you type (default: ~/.local/state/h2o-cpp/history)",
    )  # fmt: skip
    history.add_argument(
        "--no-history", action="store_true", help="do not store them (default: store)"
    )
    add_generation(parser, max_tokens=None)


def run(args: argparse.Namespace) -> int:
    """Reply on stdout to each message from stdin; everything else goes to stderr.

    After a failed message or command the conversation continues, and the status is 1 at the end.
    """
    if args.model is BUNDLED_MODEL and args.template is None:
        raise ValueError(
            "the bundled model has no chat template and only continues text (h2o-cpp run): give a "
            "chat model with -m MODEL, or a template with --template NAME"
        )
    status = 0
    history = None if args.no_history else args.history or history_file()
    with closing(Conversation(args)) as conversation, editing(history, list(COMMANDS)):
        try:
            for text in messages():
                if not text.strip():
                    continue
                if not _run_or_answer(conversation, text):
                    status = 1
        except EOFError:  # /exit
            pass
        except ValueError as error:  # an unterminated message
            _print_error(error)
            return 1
    return status


def _run_or_answer(conversation: Conversation, text: str) -> bool:
    """Whether the command or message succeeded."""
    try:
        if not is_quoted(text) and text.lstrip().startswith("/"):
            conversation.command(text)
        else:
            show(conversation.generator, conversation.say(unquoted(text)))
    except ContextFullError as error:
        _print_error(f"{with_limit_names(str(error))}: send a shorter message, or /reset")
    except BrokenPipeError:
        raise
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        _print_error(error_text(error))
    else:
        return True
    return False


def _print_error(error: object) -> None:
    print(f"error: {error}", file=sys.stderr)
