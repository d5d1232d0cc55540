"""Text that knows where its characters are from.

Imports nothing from the package: the process that renders chat templates imports it alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, SupportsIndex

VALUE = 0  # messages, tools and whatever is not known
TEMPLATE = 1  # the template itself
NAME = 2  # roles and variables, which a template may have inside its special tokens
REPLY = 3  # the reply that the rest of a prompt follows
MESSAGE = 4  # the first message; the second one is MESSAGE + 1, and so on

_PERCENT = re.compile(r"%(?:\(([^()]*)\))?([#0\- +]*\d*(?:\.\d*)?)[hlL]?([a-zA-Z%])")


class MarkedText(str):
    """A str of which every character has an origin.

    Its operations have the text that str's have. Those that are not here have a plain str, of
    which every character is a VALUE: origins may be lost, but never appear.
    """

    __slots__ = ("_origins", "_runs")
    _origins: str  # of each character, as the character of this number
    _runs: list[tuple[int, int]] | None  # if they are known

    def __new__(cls, text: str = "", origin: int | str = VALUE) -> MarkedText:
        """origin: of every character, or of each of them."""
        self = str.__new__(cls, text)
        self._origins = chr(origin) * len(text) if isinstance(origin, int) else origin
        self._runs = None
        return self

    @classmethod
    def of_runs(cls, text: str, runs: Iterable[tuple[int, int]]) -> MarkedText:
        """Text with origins from runs()."""
        found = [(origin, length) for origin, length in runs]
        self = cls(text, "".join(chr(origin) * length for origin, length in found))
        self._runs = found
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        if type(other) in (str, MarkedText):
            return joined((self, other))
        return str.__str__(self) + other

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if type(other) in (str, MarkedText) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        if not isinstance(count, int):
            return str.__str__(self) * count
        return MarkedText(str.__mul__(self, count), self._origins * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return checked(str.__mod__(self, values), _percent_pieces(self, values))

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        return MarkedText(str.__getitem__(self, index), self._origins[index])

    def __iter__(self) -> Iterator[str]:
        return map(MarkedText, str.__iter__(self), self._origins)

    def join(self, texts: Iterable[str], /) -> str:
        """Does as str.join."""
        given = [*texts] if isinstance(texts, Iterable) else texts
        text = str.join(self, given)
        pieces = chain.from_iterable(zip(repeat(self), given))
        next(pieces, None)
        return checked(text, pieces)

    def replace(self, *args: Any, **options: Any) -> str:
        """Like str.replace."""
        text = str.replace(self, *args, **options)
        old, new, *count = (*args, *options.values())
        return checked(text, [marked(new).join(self.split(old, *count))]) if old else text

    def split(self, *args: Any, **options: Any) -> list[str]:
        """Like str.split."""
        return self._parts(str.split(self, *args, **options), *args[:1], **options)

    def rsplit(self, *args: Any, **options: Any) -> list[str]:
        """Like str.rsplit."""
        return self._parts(str.rsplit(self, *args, **options), *args[:1], **options)

    def splitlines(self, *args: Any, **options: Any) -> list[str]:
        """Like str.splitlines."""
        return self._parts(str.splitlines(self, *args, **options))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """Like str.partition."""
        before, found, after = self._parts(str.partition(self, sep))
        return before, found, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        """Like str.rpartition."""
        before, found, after = self._parts(str.rpartition(self, sep))
        return before, found, after

    def _parts(self, parts: Sequence[str], sep: str | None = None, **_: Any) -> list[str]:
        """The same parts, which are in this text in order, `sep` or white space between them."""
        found, end = [], 0
        for part in parts:
            begin = self.find(part, end)  # white space is in no part but the first
            found.append(self[begin : begin + len(part)])
            end = begin + len(part) + len(sep or "")
        return found

    def strip(self, *args: Any) -> str:
        """Like str.strip."""
        text = str.strip(self, *args)
        begin = len(self) - len(str.lstrip(self, *args))
        return self[begin : begin + len(text)]

    def lstrip(self, *args: Any) -> str:
        """Like str.lstrip."""
        return self[len(self) - len(str.lstrip(self, *args)) :]

    def rstrip(self, *args: Any) -> str:
        """Like str.rstrip."""
        return self[: len(str.rstrip(self, *args))]

    def removeprefix(self, prefix: str, /) -> str:
        """Like str.removeprefix."""
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> str:
        """Like str.removesuffix."""
        return self[: len(str.removesuffix(self, suffix))]

    def lower(self) -> str:
        """Like str.lower."""
        return self._as_long(str.lower(self))

    def upper(self) -> str:
        """Like str.upper."""
        return self._as_long(str.upper(self))

    def capitalize(self) -> str:
        """Like str.capitalize."""
        return self._as_long(str.capitalize(self))

    def title(self) -> str:
        """Like str.title."""
        return self._as_long(str.title(self))

    def _as_long(self, text: str) -> str:
        """The text, made of each character or, if it is longer, of several."""
        return MarkedText(text, self._origins) if len(text) == len(self) else text


# In errors, as without marks.
MarkedText.__name__ = MarkedText.__qualname__ = "str"
MarkedText.__module__ = "builtins"


def marked(text: str) -> MarkedText:
    """The text itself if it is marked, otherwise with a VALUE's marks."""
    return text if isinstance(text, MarkedText) else MarkedText(text)


def joined(pieces: Iterable[str]) -> str:
    """The pieces as one text; plain if none is marked."""
    pieces = [*pieces]
    text = "".join(pieces)
    if not any(isinstance(piece, MarkedText) for piece in pieces):
        return text
    return MarkedText(text, "".join(marked(piece)._origins for piece in pieces))


def checked(text: str, pieces: Iterable[str]) -> str:
    """The text, with the marks of the pieces if they are that text."""
    found = joined(pieces)
    return found if found == text else text


def runs(text: str) -> list[tuple[int, int]]:
    """The origins in a text: (origin, number of characters)."""
    text = marked(text)
    if text._runs is not None:
        return text._runs
    origins = text._origins
    found, begin = [], 0
    while begin < len(origins):
        end = _run_end(origins, begin)
        found.append((ord(origins[begin]), end - begin))
        begin = end
    return found


def _run_end(text: str, begin: int) -> int:
    """Where the run of equal characters at `begin` ends; a regex would take memory for each."""
    c, n = text[begin], 1
    while text.startswith(c * n, begin):
        begin += n
        n *= 2
    while n := n // 2:
        if text.startswith(c * n, begin):
            begin += n
    return begin


def _percent_pieces(form: MarkedText, values: Any) -> Iterator[str]:
    """Pieces of form % values; not all of them for rare forms."""
    rest = iter(values if isinstance(values, tuple) else (values,))
    end = 0
    while (begin := form.find("%", end)) >= 0:
        yield form[end:begin]
        spec = _PERCENT.match(form, begin)
        if spec is None:
            return
        end = spec.end()
        key, how, kind = spec.groups()
        if kind == "%":
            yield form[end - 1 : end]
            continue
        value = next(rest, None) if key is None else values[key]
        if kind == "s" and not how and isinstance(value, str):
            yield value
        else:
            yield f"%{how}{kind}" % (value,)
    yield form[end:]
