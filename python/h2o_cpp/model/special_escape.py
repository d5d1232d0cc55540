"""Escaping of special tokens in the text of a rendered conversation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# Private-use characters, which replace others.
_PRIVATE = range(0xF0000, 0xFFFFE)
_ANY_PRIVATE = re.compile(f"[{chr(_PRIVATE[0])}-{chr(_PRIVATE[-1])}]")


def unused_characters(texts: Iterable[str]) -> Iterator[str]:
    """Private-use characters that occur in none of the texts."""
    used = set().union(*map(str.__str__, texts))  # plain ones: others make more of each character
    return (c for c in map(chr, _PRIVATE) if c not in used)


class SpecialTokenEscape:
    """Replaces characters of special tokens, so that text is a part of none; reversible."""

    def __init__(self, special: Iterable[str], unused: Iterator[str]) -> None:
        special = [*special]
        self._stand_ins = dict(zip(sorted(set().union(*special)), unused, strict=False))
        self._originals = {stand_in: c for c, stand_in in self._stand_ins.items()}
        first = "".join(sorted({text[0] for text in special}))
        self._first = re.compile(f"[{re.escape(first)}]" if first else "(?!)")

    def escape(self, text: str) -> str:
        """Text in which no special token begins, and none that begins before it continues."""
        return self._stand_ins.get(text[:1], text[:1]) + self.escape_name(text[1:])

    def escape_name(self, text: str) -> str:
        """Text in which no special token begins."""
        return self._first.sub(lambda found: self._stand_ins[found[0]], text)

    def unescape(self, text: str) -> str:
        """The original text."""
        return _ANY_PRIVATE.sub(lambda found: self._originals.get(found[0], found[0]), text)
