"""Escaping of special tokens in text that a chat template processes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

# Private-use characters, which replace others.
_PRIVATE = range(0xF0000, 0xFFFFE)


def unused_characters(texts: Iterable[str]) -> Iterator[str]:
    """Private-use characters that occur in none of the texts."""
    used = set().union(*texts)
    return (c for c in map(chr, _PRIVATE) if c not in used)


class SpecialTokenEscape:
    """Replaces first characters of special tokens, so that text contains none; reversible.

    Texts in `kept` are not changed unless a special token could begin in them.
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
        """Text without special tokens."""
        return self._found.sub(lambda m: self._stand_ins.get(m[0], m[0]), text)

    def escape_key(self, key: str) -> str:
        """An object's key, unchanged unless it is a special token."""
        return self.escape(key) if self._special.search(key) else key

    def unescape(self, text: str) -> str:
        """The original text."""
        return text.translate(self._originals)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the texts, the first one that matches; matches nothing without texts."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")
