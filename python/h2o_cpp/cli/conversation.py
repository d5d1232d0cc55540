"""A conversation in a terminal: messages and /commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from h2o_cpp.chat import Chat
from h2o_cpp.cli.argument_types import budget
from h2o_cpp.cli.options import open_generator, read_template, stream_options
from h2o_cpp.cli.run import cache_size
from h2o_cpp.cli.token_colors import color_wanted, marked
from h2o_cpp.generation.stream import Stream
from h2o_cpp.measure.inspection import VisiblePieces
from h2o_cpp.model.atomic import check_output
from h2o_cpp.model.policy import Policy


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
        self.generator = open_generator(args)
        self.generator.request([0], **self._options)  # checks them
        self._chat = self._new_chat()
        self._file: Path | None = None  # where the conversation was last saved, or loaded from

    def close(self) -> None:
        self.generator.close()

    def _new_chat(self) -> Chat:
        return Chat(self.generator, system=self._args.system, template=self._template)

    def say(self, text: str) -> Stream:
        return self._chat.say(text, **self._options)

    def command(self, line: str) -> None:
        """Run a line that begins with /.

        Raises EOFError for /exit; OSError, RuntimeError and ValueError if it fails, and then
        leaves the conversation unchanged.
        """
        name, _, argument = line.strip().partition(" ")
        found = COMMANDS.get(name)
        if found is None:
            raise ValueError(
                f"{name} is not a command (/help lists them); "
                'a message that begins so needs """ around it'
            )
        argument = argument.strip()
        if argument and not found.argument:
            raise ValueError(f"{name} takes no argument, got {argument!r}")
        if not argument and found.argument and not found.argument.startswith("["):
            raise ValueError(f"expected {name} {found.argument}")
        found.do(self, argument)

    def _help(self, _: str) -> None:
        rows = {f"{name} {each.argument}": each.meaning for name, each in COMMANDS.items()}
        width = max(map(len, rows))
        for row, meaning in rows.items():
            _print(f"{row:{width}}  {meaning}")
        _print('"""  begins and ends a message of several lines; Ctrl-C stops an answer')

    def _budget(self, argument: str) -> None:
        if argument:
            self._reopen(*argument.split())
        _print(f"[{cache_size(self.generator.stats())} | {self.generator.policy}]")

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
        _print(f"wrote {path}")

    def _load(self, path: str) -> None:
        file = Path(path).expanduser()
        self._chat = Chat.load(self.generator, file, template=self._template)
        self._file = file
        for message in self._chat.messages:
            _print(f"{message['role']}: {message['content']}")

    def _stats(self, _: str) -> None:
        stats = self.generator.stats()
        _print(
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
        policy = self.generator.policy
        policy = policy if isinstance(policy, Policy) else policy[0]
        pieces = map(VisiblePieces(self.generator.tokenizer).push, tokens)
        for part in marked(kept, pieces, policy, color=color_wanted(sys.stderr)):
            _print(part)

    def _reset(self, _: str) -> None:
        self._chat = self._new_chat()
        self._file = None

    def _exit(self, _: str) -> None:
        raise EOFError


def _print(text: str) -> None:
    print(text, file=sys.stderr)


COMMANDS = {
    "/help": _Command(Conversation._help, "", "show this"),
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
