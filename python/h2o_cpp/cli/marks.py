"""How a terminal shows which tokens of a text the cache keeps: in colours, or with brackets."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from itertools import groupby
from operator import itemgetter
from typing import TextIO

from h2o_cpp.model.policy import Policy


class Mark(Enum):
    """How a token is shown.

    Sinks and recent tokens are the same in every head. Heavy hitters are not: of several heads,
    the mark says how many keep the token.
    """

    SINK = "36", "{}", "sink", "sink"
    HEAVY = "1;33", "[]", "heavy hitter", "heavy hitter in half of the heads or more"
    MINOR = "33", "()", "", "in a quarter or more"
    RECENT = "32", "", "recent", "recent"
    EVICTED = "2", "", "evicted", "evicted, or kept in fewer heads"

    def __init__(self, sgr: str, brackets: str, of_one: str, of_many: str) -> None:
        self.sgr = sgr  # the terminal's code for its colour
        self.brackets = brackets  # what stands for it without colour
        self.of_one = of_one  # its name where one head is shown, and where several are
        self.of_many = of_many


def color_wanted(file: TextIO) -> bool:
    """Whether to use colours: on a terminal that has them, unless NO_COLOR is set."""
    dull = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return file.isatty() and not dull


def marks(shares: Sequence[float], policy: Policy) -> list[Mark]:
    """Of each token of a text, by the share of the heads that keep it."""
    n = len(shares)
    first_recent = 0 if policy.n_recent is None else n - policy.n_recent

    def mark(position: int, share: float) -> Mark:
        if share < 0.25:
            return Mark.EVICTED
        if position < policy.n_sinks:
            return Mark.SINK
        if position >= first_recent:
            return Mark.RECENT
        return Mark.HEAVY if share >= 0.5 else Mark.MINOR

    return [mark(i, share) for i, share in enumerate(shares)]


def marked(marks: Sequence[Mark], pieces: Iterable[str], *, color: bool) -> Iterator[str]:
    """The text, run by run of what is shown alike."""
    write = _colored if color else _plain
    for mark, group in groupby(zip(marks, pieces, strict=True), key=itemgetter(0)):
        yield write(mark, [piece for _, piece in group])


def legend(marks: Collection[Mark], *, color: bool, one_head: bool) -> str:
    """What the marks that occur mean."""
    entries = []
    for mark in Mark:
        name = mark.of_one if one_head else mark.of_many
        if mark not in marks:
            continue
        if color:
            entries.append(_colored(mark, [name]))
        else:
            entries.append(f"· {name}" if mark is Mark.EVICTED else _plain(mark, [name]))
    return "  ".join(entries)


def _colored(mark: Mark, pieces: Sequence[str]) -> str:
    return f"\x1b[{mark.sgr}m{''.join(pieces)}\x1b[0m"


def _plain(mark: Mark, pieces: Sequence[str]) -> str:
    """Brackets around sinks and heavy hitters, a dot for each evicted token."""
    text = "".join(pieces)
    if mark is Mark.EVICTED:
        return "·" * len(pieces)
    if not mark.brackets:
        return text
    opening, closing = mark.brackets[0], mark.brackets[1]
    words = text.strip()
    if not words:
        return f"{opening}␣{closing}{text}"
    before, _, after = text.partition(words)  # brackets belong to words, not to space around them
    return f"{before}{opening}{words}{closing}{after}"
