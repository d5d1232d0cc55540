"""Display of kept tokens in a terminal: in color, or with brackets."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from itertools import groupby
from operator import itemgetter
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from h2o_cpp.budget.policy import Policy


class TokenStyle(Enum):
    """The display of a token.

    Sinks and recent tokens are the same in every head. For heavy hitters in several heads, the
    style depends on how many heads keep the token.
    """

    SINK = "36", "{}", "sink", "sink"
    HEAVY = "1;33", "[]", "heavy hitter", "heavy hitter in half of the heads or more"
    MINOR = "33", "()", "", "in a quarter or more"
    RECENT = "32", "", "recent", "recent"
    EVICTED = "2", "", "evicted", "evicted, or kept in fewer heads"

    def __init__(self, sgr: str, brackets: str, of_one: str, of_many: str) -> None:
        self.sgr = sgr  # terminal color code
        self.brackets = brackets  # without color
        self.of_one = of_one  # labels for one head and for several
        self.of_many = of_many


def color_wanted(file: TextIO) -> bool:
    """Whether to use color: on a color terminal, unless NO_COLOR is set."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return file.isatty() and not plain


def marked(
    kept: NDArray[np.bool_],
    pieces: Iterable[str],
    policy: Policy,
    *,
    color: bool,
    one_head: bool = False,
) -> tuple[str, str]:
    """A text with its kept tokens marked, and the legend.

    kept: as for keeper_shares(). one_head: the legend does not say how many heads keep a token.
    """
    styles = _token_styles(keeper_shares(kept), policy)
    write = _colored if color else _plain
    runs = groupby(zip(styles, pieces, strict=True), key=itemgetter(0))
    text = "".join(write(style, [piece for _, piece in run]) for style, run in runs)
    return text, _legend(set(styles), color, one_head)


def keeper_shares(kept: NDArray[np.bool_]) -> list[float]:
    """The share of heads that keep each token, in layers with a cache.

    kept: [n_layers, n_kv_heads, n], whether a head keeps the token. Layers that keep none have no
        cache.
    """
    kept = kept[kept.any(axis=(1, 2))] if kept.any() else kept
    shares: list[float] = kept.mean(axis=(0, 1)).tolist()
    return shares


def _token_styles(shares: Sequence[float], policy: Policy) -> list[TokenStyle]:
    """The style of each token, by the share of heads that keep it."""
    n = len(shares)
    first_recent = 0 if policy.n_recent is None else n - policy.n_recent

    def style(position: int, share: float) -> TokenStyle:
        if share < 0.25:
            return TokenStyle.EVICTED
        if position < policy.n_sinks:
            return TokenStyle.SINK
        if position >= first_recent:
            return TokenStyle.RECENT
        return TokenStyle.HEAVY if share >= 0.5 else TokenStyle.MINOR

    return [style(i, share) for i, share in enumerate(shares)]


def _legend(styles: Collection[TokenStyle], color: bool, one_head: bool) -> str:
    """The labels of the given styles."""
    entries = []
    for style in TokenStyle:
        if style not in styles:
            continue
        name = style.of_one if one_head else style.of_many
        if color:
            entries.append(_colored(style, [name]))
        else:
            entries.append(f"· {name}" if style is TokenStyle.EVICTED else _plain(style, [name]))
    return "  ".join(entries)


def _colored(style: TokenStyle, pieces: Sequence[str]) -> str:
    return f"\x1b[{style.sgr}m{''.join(pieces)}\x1b[0m"


def _plain(style: TokenStyle, pieces: Sequence[str]) -> str:
    """Brackets around sinks and heavy hitters, a dot for each evicted token."""
    text = "".join(pieces)
    if style is TokenStyle.EVICTED:
        return "·" * len(pieces)
    if not style.brackets:
        return text
    opening, closing = style.brackets[0], style.brackets[1]
    words = text.strip()
    if not words:
        return f"{opening}␣{closing}{text}"
    before, _, after = text.partition(words)  # keep surrounding white space outside the brackets
    return f"{before}{opening}{words}{closing}{after}"
