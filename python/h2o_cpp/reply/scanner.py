"""Scanner: text that comes in pieces, as a format's parser reads it, and what the parser finds.

A parser is a generator over a Scanner: it yields where it needs more text. What it gives depends on
the text alone and not on how it was cut: a decision waits until the text that it needs is there, or
has ended.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class Content:
    """A piece of what the model says."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of what it thinks before that."""

    text: str


@dataclass(frozen=True)
class Call:
    """A whole tool call: the tool's name, and its arguments, a JSON object as text."""

    name: str
    arguments: str


Part = Content | Reasoning | Call

_T = TypeVar("_T")
Steps = Generator[None, None, _T]

_WORD = re.compile(r"[\w.-]+")
_JSON_PARTS = re.compile(r'[{}\[\]"]')
_STRING_PARTS = re.compile(r'["\\]')


class Scanner:
    """Attributes: `rest`, text that has not been taken yet; `ended`, whether no more comes;
    `found`, parts that have not been fetched."""

    def __init__(self) -> None:
        self.rest = ""
        self.ended = False
        self.found: list[Part] = []
        self._space = ""  # before a marker that may begin a call, whose content it then is not

    def say(self, text: str, kind: type[Content] | type[Reasoning] = Content) -> None:
        """The parser has found a piece of it."""
        if not text:
            return
        if self.found and type(last := self.found[-1]) is kind:
            self.found[-1] = kind(last.text + text)
        else:
            self.found.append(kind(text))

    def call(self, name: str, arguments: str) -> None:
        """The parser has found a call; spaces around it are not content."""
        self._space = ""
        self.found.append(Call(name, arguments))

    def not_a_call(self, text: str) -> None:
        """What looked like one is content, with the spaces before it."""
        space, self._space = self._space, ""
        self.say(space + text)

    def more(self) -> Steps[bool]:
        """Wait for more text; False when it has ended."""
        if self.ended:
            return False
        yield
        return True

    def take(self, n: int) -> str:
        """The next n characters, which are there."""
        taken, self.rest = self.rest[:n], self.rest[n:]
        return taken

    def spaces(self) -> Steps[str]:
        """Take white space, up to something else or the end."""
        taken: list[str] = []
        while True:
            n = len(self.rest) - len(self.rest.lstrip())
            taken.append(self.take(n))
            if self.rest or not (yield from self.more()):
                return "".join(taken)

    def starts(self, marker: str) -> Steps[bool]:
        """Whether the rest begins with the marker, which is then taken."""
        while not self.rest.startswith(marker):
            if not marker.startswith(self.rest) or not (yield from self.more()):
                return False
        self.take(len(marker))
        return True

    def until(
        self, markers: Sequence[str], kind: type[Content] | type[Reasoning] | None = Content
    ) -> Steps[tuple[str, str | None]]:
        """Take text up to the first marker, which is taken too, or to the end: (text, marker).

        With a kind it is said as it comes, and the text given back is empty; white space before a
        marker is kept for not_a_call() where the kind is Content, and dropped otherwise.
        """
        taken: list[str] = []
        while True:
            places = [(at, marker) for marker in markers if (at := self.rest.find(marker)) >= 0]
            at, marker = min(places, key=lambda place: (place[0], -len(place[1])), default=(-1, ""))
            # A longer marker, or one that begins before, may be on its way.
            begun = self._begun(markers)
            if at >= 0 and (self.ended or begun >= at + len(marker)):
                before = self.take(at)
                self.take(len(marker))
                taken.append(before)
                return self._up_to("".join(taken), kind), marker
            n = len(self.rest) if self.ended else (begun if at < 0 else min(at, begun))
            if kind is not None and not self.ended:
                n = len(self.rest[:n].rstrip())
            taken.append(self.take(n))
            if kind is not None:
                self.say("".join(taken), kind)
                taken.clear()
            if not (yield from self.more()):
                return "".join(taken), None

    def _up_to(self, text: str, kind: type[Content] | type[Reasoning] | None) -> str:
        if kind is None:
            return text
        said = text.rstrip()
        self.say(said, kind)
        self._space = text[len(said) :] if kind is Content else ""
        return ""

    def _begun(self, markers: Sequence[str]) -> int:
        """Where the rest ends with the beginning of a marker; its length if it does not."""
        size = len(self.rest)
        for at in range(max(0, size - max(map(len, markers)) + 1), size):
            if any(m.startswith(self.rest[at:]) for m in markers):
                return at
        return size

    def word(self) -> Steps[str]:
        """Take letters, digits and any of "_.-", such as a tool's name; perhaps none."""
        taken: list[str] = []
        while True:
            match = _WORD.match(self.rest)
            taken.append(self.take(match.end() if match else 0))
            if self.rest or not (yield from self.more()):
                return "".join(taken)

    def remainder(self, kind: type[Content] | type[Reasoning] = Content) -> Steps[None]:
        """All the rest is of this kind."""
        while True:
            self.say(self.take(len(self.rest)), kind)
            if not (yield from self.more()):
                return

    def json_value(self) -> Steps[str | None]:
        """Take an object or array of JSON; None, and nothing is taken, if there is no whole one."""
        at = depth = 0
        inside = False  # a string
        while True:
            if self.rest and self.rest[0] not in "{[":
                return None
            at, depth, inside = _scan(self.rest, at, depth, inside)
            if at > 0 and depth == 0:
                return self.take(at)
            if not (yield from self.more()):
                return None


def _scan(text: str, at: int, depth: int, inside: bool) -> tuple[int, int, bool]:
    """Go on to where the value is complete (depth 0), or to the end of what is there."""
    while match := (_STRING_PARTS if inside else _JSON_PARTS).search(text, at):
        c, at = match[0], match.end()
        if c == "\\":
            if at == len(text):
                return at - 1, depth, inside  # with what it escapes
            at += 1
        elif c == '"':
            inside = not inside
        else:
            depth += 1 if c in "{[" else -1
            if depth <= 0:
                return at, 0, False
    return (len(text) if depth or inside else 0), depth, inside
