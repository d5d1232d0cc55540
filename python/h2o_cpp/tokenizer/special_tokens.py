"""Special tokens in text: finding them where they are meant, and keeping them out where not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import islice

# Characters of private use, from which stand-ins are taken.
_PRIVATE = range(0xF0000, 0xFFFFE)


def unused_characters(texts: Iterable[str]) -> Iterator[str]:
    """Characters that are in none of `texts`."""
    used = set().union(*texts)
    return (c for c in map(chr, _PRIVATE) if c not in used)


class SpecialTokens:
    """The texts of special tokens, with their ids."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._any = _any_of(sorted(ids, key=len, reverse=True))  # the longest wins
        self._beginnings = _any_of({text[:2] for text in ids})

    def split(self, text: str) -> Iterator[int | str]:
        """The special tokens in `text`, and the texts between them that are not empty."""
        end = 0
        for match in self._any.finditer(text):
            if end < match.start():
                yield text[end : match.start()]
            yield self._ids[match[0]]
            end = match.end()
        if end < len(text):
            yield text[end:]

    def disguise(self, unused: Iterator[str], kept: Iterable[str] = ()) -> Disguise:
        """Stand-ins for the characters that special tokens begin with.

        What is in `kept` stays as it is, unless a special token could begin in it.
        """
        first = sorted({text[0] for text in self._ids})
        harmless = {text for text in kept if len(text) > 1 and not self._beginnings.search(text)}
        return Disguise(dict(zip(first, islice(unused, len(first)), strict=True)), harmless)


class Disguise:
    """Makes text that cannot be taken for special tokens, and undoes it."""

    def __init__(self, stand_ins: Mapping[str, str], kept: Set[str]) -> None:
        self._stand_ins = stand_ins
        self._originals = {ord(stand_in): c for c, stand_in in stand_ins.items()}
        self._found = _any_of([*sorted(kept, key=len, reverse=True), *stand_ins])

    def put_on(self, text: str) -> str:
        """`text` in disguise."""
        return self._found.sub(lambda m: self._stand_ins.get(m[0], m[0]), text)

    def take_off(self, text: str) -> str:
        """What the text was."""
        return text.translate(self._originals)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of any of `texts`, the first that fits; of nothing if there are none."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")
