"""The layout of help."""

from __future__ import annotations

import argparse
import copy
import textwrap
from collections.abc import Iterable
from itertools import takewhile
from typing import Any


class Help(argparse.HelpFormatter):
    """Fills paragraphs with whole words, but keeps lists and examples, whose lines are indented.

    The epilog lists the commands in groups. The usage line shows required arguments. Aliases of an
    option, after its first long name, are hidden.
    """

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None
    ) -> str:
        words = [self._prog]
        options = False
        for action in actions:
            if action.option_strings and not action.required:
                options = True
                continue
            if action.option_strings:
                words.append(action.option_strings[0])
            name = str(action.metavar or action.dest)
            words.append(name if action.required else f"[{name}]")
        words += ["[options]"] if options else []
        return f"{'usage: ' if prefix is None else prefix}{' '.join(words)}\n\n"

    def _split_lines(self, text: str, width: int) -> list[str]:
        words = " ".join(text.split())
        return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = textwrap.dedent(text).strip().split("\n\n")
        return "\n\n".join(
            paragraph if "\n  " in paragraph else "\n".join(self._split_lines(paragraph, width))
            for paragraph in paragraphs
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        short = list(takewhile(lambda name: not name.startswith("--"), action.option_strings))
        shown.option_strings = action.option_strings[: len(short) + 1]
        return super()._format_action_invocation(shown)

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return ""
        return super()._format_action(action)
