"""Messages that a user types: one in a line, or in several between triple quotes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_QUOTES = '"""'
_MAX_ENTRIES = 1000  # of the history file


def messages() -> Iterator[str]:
    """Those of stdin, to its end; on a terminal with a prompt, and Ctrl-C takes a line back.

    A message between triple quotes is one, whatever its lines begin with; they are part of it, so
    that it is not a command. Raises ValueError, once, if they are not closed.
    """
    on_terminal = sys.stdin.isatty()
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
                print()
            return
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            print("\n(Ctrl-D or /exit ends)")
            continue
        yield text


def is_quoted(text: str) -> bool:
    """Whether a message was given between triple quotes."""
    return text.startswith(_QUOTES)


def unquoted(text: str) -> str:
    """A message without the triple quotes around it, and the line ends next to them."""
    if not is_quoted(text):
        return text
    return text.strip().removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")


def history_file() -> Path:
    """Where lines are kept: h2o-cpp/history in the user's state directory (XDG)."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "h2o-cpp" / "history"


@contextmanager
def editing(history: Path | None, commands: Sequence[str]) -> Iterator[None]:
    """On a terminal: line editing, history, and Tab for commands.

    history: the file that keeps lines from one conversation to the next, readable by its owner
        alone; None: they are not kept.
    """
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:  # a Python without it
        yield
        return

    def complete(text: str, i: int) -> str | None:
        return [*(name for name in commands if name.startswith(text)), None][i]

    before = readline.get_completer(), readline.get_completer_delims()
    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
    readline.clear_history()
    if history is not None:
        with suppress(OSError):  # there is none yet, or it cannot be read
            readline.read_history_file(history)
    try:
        yield
    finally:
        readline.set_completer(before[0])
        readline.set_completer_delims(before[1])
        if history is not None:
            readline.set_history_length(_MAX_ENTRIES)
            with suppress(OSError):  # a directory that cannot be written loses the history only
                history.parent.mkdir(parents=True, exist_ok=True)
                history.touch(mode=0o600)
                readline.write_history_file(history)
