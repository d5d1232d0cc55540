"""Keeps special tokens out of text that a chat template handles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

# Characters of private use, from which stand-ins are taken.
_PRIVATE = range(0xF0000, 0xFFFFE)


def unused_characters(texts: Iterable[str]) -> Iterator[str]:
    """Characters that are in none of `texts`."""
    used = set().union(*texts)
    return (c for c in map(chr, _PRIVATE) if c not in used)


class SpecialTokenEscape:
    """Makes text that spells no special token, and undoes it.

    It replaces the characters that special tokens begin with. What is in `kept` stays as it is,
    unless a special token could begin in it.
    """

    def __init__(
        self, special: Iterable[str], unused: Iterator[str], kept: Iterable[str] = ()
    ) -> None:
        special = list(special)
        first = sorted({text[0] for text in special})
        self._stand_ins = dict(zip(first, islice(unused, len(first)), strict=True))
        self._originals = {ord(stand_in): c for c, stand_in in self._stand_ins.items()}
        self._special = _any_of(special)
        beginnings = _any_of({text[:2] for text in special})
        harmless = {text for text in kept if len(text) > 1 and not beginnings.search(text)}
        self._found = _any_of([*sorted(harmless, key=len, reverse=True), *first])

    def escape(self, text: str) -> str:
        """`text` in escaping."""
        return self._found.sub(lambda m: self._stand_ins.get(m[0], m[0]), text)

    def escape_key(self, key: str) -> str:
        """A key of an object, which stays as it is, to be found, unless it spells one."""
        return self.escape(key) if self._special.search(key) else key

    def unescape(self, text: str) -> str:
        """What the text was."""
        return text.translate(self._originals)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of any of `texts`, the first that fits; of nothing if there are none."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")
