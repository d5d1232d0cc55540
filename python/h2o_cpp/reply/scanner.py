"""Scanner: text that comes in pieces, as a format's parser reads it, and what the parser finds.

A parser is a generator over a Scanner: it yields where it needs more text. What it gives depends on
the text alone and not on how it was cut: a decision waits until the text that it needs is there, or
has ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
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
class CallDelta:
    """A piece of a tool call: its first has the tool's name, and all of them together the
    arguments. Then comes a Call, or NoCall.

    index: which one it is of the calls that begin in the reply, as of the other two.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Call:
    """A whole tool call: the tool's name, and its arguments, a JSON object as text."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True)
class NoCall:
    """What began as a call is none, or is cut off: content, as it was written."""

    index: int
    text: str


Part = Content | Reasoning | CallDelta | Call | NoCall

_T = TypeVar("_T")
Steps = Generator[None, None, _T]

_SPACES = re.compile(r"\s*")
_WORD = re.compile(r"[\w.-]*")


@dataclass
class _OpenCall:
    """One that has begun and not ended."""

    index: int
    name: str
    arguments: list[str] = field(default_factory=list)
    n_told: int = 0  # of these


class Scanner:
    """Attributes: `rest`, text that has not been taken yet; `ended`, whether no more comes;
    `found`, parts that have not been fetched, but for the arguments of a call."""

    def __init__(self) -> None:
        self.rest = ""
        self.ended = False
        self.found: list[Part] = []
        self._space = ""  # before a marker that may begin a call, whose content it then is not
        self._taken: list[str] | None = None  # since keep()
        self._n_calls = 0  # that have begun
        self._call: _OpenCall | None = None

    def say(self, text: str, kind: type[Content] | type[Reasoning] = Content) -> None:
        """The parser has found a piece of it."""
        if not text:
            return
        if self.found and type(last := self.found[-1]) is kind:
            self.found[-1] = kind(last.text + text)
        else:
            self.found.append(kind(text))

    def begin_call(self, name: str) -> None:
        """The parser has found the name of a call."""
        self._call = _OpenCall(self._n_calls, name)
        self._n_calls += 1

    def add_arguments(self, text: str) -> None:
        """And some of its arguments."""
        assert self._call is not None
        self._call.arguments.append(text)

    def end_call(self) -> None:
        """And all of them; spaces around a call are not content."""
        call = self._call
        assert call is not None
        self._tell_arguments()
        self.found.append(Call(call.index, call.name, "".join(call.arguments)))
        self._space, self._call, self._taken = "", None, None

    def keep(self, text: str = "") -> None:
        """Remember what is taken from here on, after this text, for not_a_call()."""
        self._taken = [text]

    def not_a_call(self) -> None:
        """What was taken since keep() looked like one, and is content, with the spaces before."""
        text = self._space + "".join(self._taken or ())
        self._space, self._taken = "", None
        if self._call is None:
            self.say(text)
        else:
            self._tell_arguments()
            self.found.append(NoCall(self._call.index, text))
            self._call = None

    def fetch(self) -> list[Part]:
        """What was found since the last time."""
        self._tell_arguments()
        found, self.found = self.found, []
        return found

    def _tell_arguments(self) -> None:
        call = self._call
        if call is not None and call.n_told < len(call.arguments):
            name = None if call.n_told else call.name
            text = "".join(call.arguments[call.n_told :])
            self.found.append(CallDelta(call.index, name, text))
            call.n_told = len(call.arguments)

    def more(self) -> Steps[bool]:
        """Wait for more text; False when it has ended."""
        if self.ended:
            return False
        yield
        return True

    def has(self, n: int) -> Steps[bool]:
        """Whether there are n more characters."""
        while len(self.rest) < n:
            if not (yield from self.more()):
                return False
        return True

    def peek(self) -> Steps[str]:
        """The next character, which is not taken; none at the end."""
        return self.rest[0] if (yield from self.has(1)) else ""

    def take(self, n: int) -> str:
        """The next n characters, which are there."""
        taken, self.rest = self.rest[:n], self.rest[n:]
        if self._taken is not None:
            self._taken.append(taken)
        return taken

    def run(
        self, characters: re.Pattern[str], out: Callable[[str], object] | None = None
    ) -> Steps[str]:
        """Take all of these characters that come next; out: takes them as they come."""
        taken: list[str] = []
        while True:
            match = characters.match(self.rest)
            if match and match[0]:
                (out or taken.append)(self.take(match.end()))
            if self.rest or not (yield from self.more()):
                return "".join(taken)

    def spaces(self) -> Steps[str]:
        """Take white space, up to something else or the end."""
        return (yield from self.run(_SPACES))

    def word(self) -> Steps[str]:
        """Take letters, digits and any of "_.-", such as a tool's name; perhaps none."""
        return (yield from self.run(_WORD))

    def starts(self, marker: str) -> Steps[bool]:
        """Whether the rest begins with the marker, which is then taken."""
        while not self.rest.startswith(marker):
            if not marker.startswith(self.rest) or not (yield from self.more()):
                return False
        self.take(len(marker))
        return True

    def until(
        self, markers: Sequence[str], kind: type[Content] | type[Reasoning] = Content
    ) -> Steps[str | None]:
        """Say text up to the first marker, which is taken too and given back, or to the end.

        White space before a marker is kept for not_a_call() where the kind is Content, and dropped
        otherwise.
        """
        held = ""

        def out(text: str) -> None:
            nonlocal held
            text = held + text
            said = text.rstrip()
            held = text[len(said) :]
            self.say(said, kind)

        marker = yield from self.up_to(markers, out)
        if marker is None:
            self.say(held, kind)
        elif kind is Content:
            self._space = held
        return marker

    def up_to(self, markers: Sequence[str], out: Callable[[str], object]) -> Steps[str | None]:
        """Take text up to the first marker, which is taken too and given back, or to the end;
        out() takes the text as it comes."""
        while True:
            places = [(at, marker) for marker in markers if (at := self.rest.find(marker)) >= 0]
            at, marker = min(places, key=lambda place: (place[0], -len(place[1])), default=(-1, ""))
            # A longer marker, or one that begins before, may be on its way.
            begun = self._begun(markers)
            if at >= 0 and (self.ended or begun >= at + len(marker)):
                out(self.take(at))
                self.take(len(marker))
                return marker
            n = len(self.rest) if self.ended else (begun if at < 0 else min(at, begun))
            out(self.take(n))
            if not (yield from self.more()):
                return None

    def _begun(self, markers: Sequence[str]) -> int:
        """Where the rest ends with the beginning of a marker; its length if it does not."""
        size = len(self.rest)
        for at in range(max(0, size - max(map(len, markers)) + 1), size):
            if any(m.startswith(self.rest[at:]) for m in markers):
                return at
        return size

    def remainder(self, kind: type[Content] | type[Reasoning] = Content) -> Steps[None]:
        """All the rest is of this kind."""
        while True:
            self.say(self.take(len(self.rest)), kind)
            if not (yield from self.more()):
                return
