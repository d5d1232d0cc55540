"""Input of messages, on one line or between triple quotes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path

from h2o_cpp.cli.output import put

_QUOTES = '"""'
_MAX_ENTRIES = 1000  # of the history file


def messages() -> Iterator[str]:
    """Messages from stdin; on a terminal with a prompt, where Ctrl-C discards a line.

    A message between triple quotes is returned with them, so that it is not taken as a command.
    Raises ValueError, once, if they are not closed.
    """
    on_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # only a message with such bytes fails
    ask, go_on = ("> ", "... ") if on_terminal else ("", "")
    while True:
        try:
            text = input(ask)
            if text.lstrip().startswith(_QUOTES):
                text = text.lstrip()
                while not (len(text) > 5 and text.rstrip().endswith(_QUOTES)):
                    try:
                        text += "\n" + input(go_on)
                    except EOFError:
                        raise ValueError(f"the message has no closing {_QUOTES}") from None
        except EOFError:
            if on_terminal:
                put()
            return
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            put("\n(Ctrl-D or /exit ends)", lines=True)
            continue
        yield text


def is_quoted(text: str) -> bool:
    return text.startswith(_QUOTES)


def unquoted(text: str) -> str:
    """A message without triple quotes and the line breaks next to them.

    Raises ValueError for bytes that could not be decoded.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the message is not UTF-8 text") from None
    if not is_quoted(text):
        return text
    return text.strip().removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")


def history_file() -> Path:
    """h2o-cpp/history in the user's state directory (XDG)."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "h2o-cpp" / "history"


@contextmanager
def editing(history: Path | None, commands: Sequence[str]) -> Iterator[None]:
    """On a terminal: line editing, history, and completion of commands with Tab.

    history: the file that stores the lines, readable only by its owner; None: no history.
    """
    if not sys.stdin.isatty() or find_spec("readline") is None:  # not in every Python
        yield
        return
    import readline

    def complete(text: str, i: int) -> str | None:
        return [*(name for name in commands if name.startswith(text)), None][i]

    before = readline.get_completer(), readline.get_completer_delims()
    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
    readline.clear_history()
    if history is not None:
        with suppress(OSError):  # it does not exist or cannot be read
            readline.read_history_file(history)
    try:
        yield
    finally:
        readline.set_completer(before[0])
        readline.set_completer_delims(before[1])
        if history is not None:
            readline.set_history_length(_MAX_ENTRIES)
            with suppress(OSError):  # the history is then lost
                history.parent.mkdir(parents=True, exist_ok=True)
                history.touch(mode=0o600)
                readline.write_history_file(history)
