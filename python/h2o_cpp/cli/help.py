"""How help is laid out."""

from __future__ import annotations

import argparse
import textwrap


class Help(argparse.HelpFormatter):
    """Paragraphs are filled; lists and examples, whose lines are indented, stay as they are.

    Commands are in the epilog, in groups, and not among the arguments.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = textwrap.dedent(text).strip().split("\n\n")
        return "\n\n".join(
            paragraph if "\n  " in paragraph else textwrap.fill(" ".join(paragraph.split()), width)
            for paragraph in paragraphs
        )

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return ""
        return super()._format_action(action)
