"""Chat with a model; Ctrl-C stops a reply, Ctrl-D ends the program.

Each line is a message; a message of several lines begins and ends with three double quotes. Lines
that begin with / are commands: /help, /file, /budget, /stats, /inspect, /save, /load, /reset and
/exit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from h2o_cpp import BUNDLED_MODEL
from h2o_cpp.budget.policy import each
from h2o_cpp.chat import Chat
from h2o_cpp.cli.argument_types import budget
from h2o_cpp.cli.files import error_text, read_text
from h2o_cpp.cli.forgotten import described, lost_messages
from h2o_cpp.cli.line_editor import editing, history_file, is_quoted, messages, unquoted
from h2o_cpp.cli.option_names import with_limit_names
from h2o_cpp.cli.options import (
    add_generation,
    add_model,
    add_template,
    open_generator,
    read_template,
    stream_options,
)
from h2o_cpp.cli.output import put_styled, tell, tell_error
from h2o_cpp.cli.parser import Parser
from h2o_cpp.cli.run import cache_size, show
from h2o_cpp.cli.token_colors import color_wanted, marked
from h2o_cpp.files.atomic import check_output
from h2o_cpp.generation.request import ContextFullError
from h2o_cpp.generation.stream import Stream
from h2o_cpp.model.visible_pieces import VisiblePieces

_MESSAGES = (
    "messages are lines of stdin: echo MESSAGE | h2o-cpp chat -m MODEL; h2o-cpp run continues a "
    "text"
)


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
    parser.add_argument(
        "--truncation", choices=("error", "auto"), default="error",
        help="auto: where the context ends, drop the oldest turns, but not the system prompt "
        "(default: an error)",
    )  # fmt: skip
    parser.add_argument(
        "-f", "--file", type=Path, metavar="FILE",
        help="begin the first message with the text of FILE, of any length (default: none)",
    )  # fmt: skip
    history = parser.add_mutually_exclusive_group()
    history.add_argument(
        "--history", type=Path, metavar="FILE",
        help="file that stores the lines you type (default: ~/.local/state/h2o-cpp/history)",
    )  # fmt: skip
    history.add_argument(
        "--no-history", action="store_true", help="do not store them (default: store)"
    )
    add_generation(parser, max_tokens=None, policy="contribution", protect="auto")

    def check(args: argparse.Namespace, extras: Sequence[str]) -> None:
        for word in extras:
            if word in ("-p", "--prompt"):
                raise ValueError(f"unrecognized arguments: {word}; {_MESSAGES}")

    parser.add_check(check)
    parser.hint = _MESSAGES


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
            tell_error(str(error))
            return 1
    return status


def _run_or_answer(conversation: Conversation, text: str) -> bool:
    """Whether the command or message succeeded, or was only mistyped."""
    try:
        if not is_quoted(text) and text.lstrip().startswith("/"):
            conversation.command(text)
        else:
            try:
                stream = conversation.say(unquoted(text))
            except KeyboardInterrupt:
                tell("stopped; the message was not sent")
                return False
            show(conversation.generator, stream)
            for note in conversation.notes(stream):
                tell(f"note: {note}")
    except ContextFullError as error:
        ways = f"send a shorter message, {conversation.ways_on}"
        tell_error(f"{with_limit_names(str(error))}: {ways}")
        conversation.detach()
    except BrokenPipeError:
        raise
    except _UnknownCommandError as error:
        tell_error(str(error))
        return True
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        tell_error(error_text(error))
    else:
        return True
    return False


class _UnknownCommandError(ValueError):
    pass


class _Command(NamedTuple):
    do: Callable[[Conversation, str], None]
    argument: str
    meaning: str


class Conversation:
    """A Chat with its Generator and the /commands, which print to stderr."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the model; raises as Generator and Chat do."""
        self._args = args
        self._template = read_template(args.template)
        self._options = stream_options(args)
        self._options.pop("protect")  # of the conversation
        self.generator = open_generator(args)
        self.generator.request([0], **self._options)  # checks them
        self._chat = self._new_chat()
        self._file: Path | None = None  # where the conversation was last saved, or loaded from
        self._lost: set[int] = set()  # messages that it was said the model has not
        self._text = ""  # of a file, for the next message
        if args.file is not None:
            self._attach(str(args.file))

    @property
    def ways_on(self) -> str:
        """Ways to go on after the end of the context."""
        if self._args.positions != "original" and self.generator._runtime().model.can_roll:
            return "/budget 0.2 to go on without a limit, or /reset"
        return "or /reset; with --truncation auto, the oldest turns are dropped"

    def close(self) -> None:
        self.generator.close()

    def _new_chat(self) -> Chat:
        return Chat(
            self.generator,
            system=self._args.system,
            template=self._template,
            protect=self._args.protect,
            truncation=self._args.truncation,
        )

    def say(self, text: str) -> Stream:
        stream = self._chat.say(f"{self._text}{text}", **self._options)
        self._text = ""
        return stream

    def detach(self) -> None:
        """Leave a file's text out of the next message."""
        if self._text:
            tell("the next message begins without the file")
        self._text = ""

    def notes(self, stream: Stream) -> Iterator[str]:
        """Sentences that the user should read after a reply."""
        if not self.generator.endless and stream.finish_message:
            yield self.ways_on
        n_read, n = stream.prompt_tokens_read, stream.prompt_tokens
        if stream.finish_reason == "cancelled" and n_read < n:
            yield f"stopped after {n_read} of {n} tokens; the next message goes on, or /reset"
        messages, memory = self._chat.messages, stream.prompt_memory
        lost = lost_messages(messages, memory)
        if lost - self._lost:
            yield described(messages, lost, memory)
        if memory.messages:  # otherwise it is not known
            self._lost = lost

    def command(self, line: str) -> None:
        """Run a line that begins with /.

        Raises EOFError for /exit; OSError, RuntimeError and ValueError (_UnknownCommandError) if it
        fails, and then leaves the conversation unchanged.
        """
        name, _, argument = line.strip().partition(" ")
        found = COMMANDS.get(_ALIASES.get(name, name))
        if found is None:
            raise _UnknownCommandError(
                f"{name} is not a command (/help lists them); "
                'a message that begins so needs """ around it'
            )
        argument = argument.strip()
        if argument and not found.argument:
            raise ValueError(f"{name} takes no argument, got {argument!r}")
        if not argument and found.argument and not found.argument.startswith("["):
            raise ValueError(f"expected {name} {found.argument}")
        found.do(self, argument)

    def _attach(self, path: str) -> None:
        text = read_text(Path(path).expanduser())
        self._text = f"{self._text}{text.rstrip()}\n\n"
        tell(f"the next message begins with {path}, {len(text)} characters")

    def _help(self, _: str) -> None:
        rows = {f"{name} {each.argument}": each.meaning for name, each in COMMANDS.items()}
        width = max(map(len, rows))
        for row, meaning in rows.items():
            tell(f"{row:{width}}  {meaning}")
        tell('"""  begins and ends a message of several lines; Ctrl-C stops an answer')

    def _budget(self, argument: str) -> None:
        if argument:
            self._reopen(*argument.split())
        tell(f"[{cache_size(self.generator.stats())} | {self.generator.policy}]")

    def _reopen(self, hh: str, policy: str | None = None, *more: str) -> None:
        if more:
            raise ValueError(f"expected /budget X POLICY, got {' '.join(more)!r} too")
        try:
            amount = None if hh == "full" else budget(hh)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{hh}: {error}, auto or full") from None
        changed = {"hh": amount, "policy": policy, "recent": None, "cache_memory": None}
        generator = open_generator(argparse.Namespace(**(vars(self._args) | changed)))
        self._chat = self._chat.moved(generator)
        self.generator.close()
        self.generator = generator

    def _save(self, argument: str) -> None:
        path = argument.removeprefix("--force ").removesuffix(" --force").strip()
        if path == "--force":
            raise ValueError(f"expected /save {COMMANDS['/save'].argument}")
        file = Path(path).expanduser()
        check_output(file, overwrite=path != argument or file == self._file)
        self._chat.save(file)
        self._file = file
        tell(f"wrote {path}")

    def _load(self, path: str) -> None:
        file = Path(path).expanduser()
        self._chat = Chat.load(
            self.generator, file, template=self._template, protect=self._args.protect
        )
        self._file, self._lost = file, set()
        for message in self._chat.messages:
            tell(f"{message['role']}: {message['content']}", lines=True)

    def _stats(self, _: str) -> None:
        stats = self.generator.stats()
        tell(
            f"[{stats.tokens_seen} tokens seen, {stats.tokens_kept} kept, {stats.evictions} evicted"
            f" | {cache_size(stats)} | {stats.backend}]"
        )

    def _inspect(self, _: str) -> None:
        stats = self.generator.stats()
        tokens = self._chat.tokens[: stats.tokens_seen]  # the last token may not have been read
        if not tokens:
            raise ValueError("nothing has been read yet, send a message first")
        kept = np.zeros((stats.n_layers, stats.n_kv_heads, len(tokens)), bool)
        for layer, head in np.ndindex(kept.shape[:2]):
            kept[layer, head, self.generator.kept(layer, head)[0]] = True
        policy = each(self.generator.policy)[0]
        pieces = map(VisiblePieces(self.generator.tokenizer).push, tokens)
        for part in marked(kept, pieces, policy, color=color_wanted(sys.stderr)):
            put_styled(part, to_stderr=True)

    def _reset(self, _: str) -> None:
        self._chat = self._new_chat()
        self._file, self._lost, self._text = None, set(), ""

    def _exit(self, _: str) -> None:
        raise EOFError


COMMANDS = {
    "/help": _Command(Conversation._help, "", "show this"),
    "/file": _Command(
        Conversation._attach, "FILE", "begin the next message with a text file of any length"
    ),
    "/budget": _Command(
        Conversation._budget, "[X [POLICY]]", "keep X as --hh does, or full; without X: what it is"
    ),
    "/stats": _Command(Conversation._stats, "", "what the cache holds"),
    "/inspect": _Command(Conversation._inspect, "", "which tokens the cache still keeps"),
    "/save": _Command(
        Conversation._save,
        "FILE [--force]",
        "write the conversation and its cache; --force replaces another file",
    ),
    "/load": _Command(Conversation._load, "FILE", "continue a saved conversation"),
    "/reset": _Command(Conversation._reset, "", "start a new conversation"),
    "/exit": _Command(Conversation._exit, "", "end; so does Ctrl-D"),
}
# Names in other programs.
_ALIASES = {"/clear": "/reset", "/new": "/reset", "/bye": "/exit", "/quit": "/exit", "/?": "/help"}
