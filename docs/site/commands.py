"""Every command of h2o-cpp as a page: its options, as argparse knows them."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from html import escape

from h2o_cpp.cli import make_parser


def command_reference() -> str:
    """Markdown of every command, in the order of the help."""
    parser = make_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return "\n\n".join(
        part for name, command in commands.choices.items() for part in _command(name, command)
    )


def _command(name: str, command: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {name}"
    yield _paragraphs(command.description or "")
    example = (command.epilog or "").partition("example:\n")[2]
    yield f"```sh\n{textwrap.dedent(example).strip()}\n```"
    for group in command._action_groups:
        actions = [
            action
            for action in group._group_actions
            if not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS
        ]
        if actions:
            if group.title not in ("positional arguments", "options"):
                yield f"**{group.title}**"
            yield "\n".join(["| | |", "|---|---|", *(_row(command, a) for a in actions)])


def _row(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = command.formatter_class(command.prog)  # in no colors
    names = formatter._format_action_invocation(action)
    return f"| `{_cell(names)}` | {_cell(_text(formatter._expand_help(action)))} |"


def _paragraphs(description: str) -> str:
    """Lays paragraphs out as Help does: what is indented stays as it is."""
    paragraphs = textwrap.dedent(description).strip().split("\n\n")
    return "\n\n".join(
        f"```\n{paragraph}\n```" if "\n  " in paragraph else _text(paragraph)
        for paragraph in paragraphs
    )


def _text(text: str) -> str:
    """Escapes Markdown, except in options, which are code."""
    parts = re.split(r"(?<![\w-])(--?[a-z][\w-]*)", text)
    return "".join(f"`{part}`" if i % 2 else _plain(part) for i, part in enumerate(parts))


def _plain(text: str) -> str:
    text = re.sub(r"([\\*_\[\]`])", r"\\\1", escape(text, quote=False))
    return re.sub(r",(?=\S)", ",<wbr>", text)  # a list of names may be broken


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
