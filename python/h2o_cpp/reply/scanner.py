"""Scanner: incremental reading of text for the parsers, and the parts that they emit.

A parser is a generator over a Scanner: it yields when it needs more text. Its parts depend only on
the text, not on how it was split: a decision waits until the necessary text has arrived or ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar


@dataclass(frozen=True)
class Content:
    """A piece of the reply's text."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of the reasoning before it."""

    text: str


@dataclass(frozen=True)
class CallDelta:
    """A piece of a tool call: the first has the tool's name, all together the arguments. A Call or
    a NoCall follows.

    index: the number of the call in the reply.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Call:
    """A complete tool call: the tool's name and its arguments, a JSON object as text."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True)
class NoCall:
    """A malformed or incomplete call; text: its source, which is content."""

    index: int
    text: str


Part = Content | Reasoning | CallDelta | Call | NoCall

_T = TypeVar("_T")
Steps = Generator[None, None, _T]

_SPACES = re.compile(r"\s*")
_WORD = re.compile(r"[\w.-]*")


@dataclass
class _OpenCall:
    """A call whose end has not been read."""

    index: int
    name: str
    arguments: list[str] = field(default_factory=list)
    n_emitted: int = 0  # arguments already emitted


class Scanner:
    """Attributes: `rest`, unread text; `ended`, whether the text is complete; `found`, parts that
    were not fetched, except arguments of calls.
    """

    def __init__(self) -> None:
        self.rest = ""
        self.ended = False
        self.found: list[Part] = []
        # White space before a marker, or around calls: content if more content follows.
        self._space = ""
        self._has_content = False
        self._taken: list[str] | None = None  # text since keep()
        self._n_calls = 0  # calls begun
        self._call: _OpenCall | None = None

    def emit(self, text: str, kind: type[Content] | type[Reasoning] = Content) -> None:
        """Emit a piece of content or reasoning."""
        if not text:
            return
        if kind is Content:
            text, self._space, self._has_content = self._space + text, "", True
        if self.found and type(last := self.found[-1]) is kind:
            self.found[-1] = kind(last.text + text)
        else:
            self.found.append(kind(text))

    def begin_call(self, name: str) -> None:
        """Emit the name of a call."""
        self._call = _OpenCall(self._n_calls, name)
        self._n_calls += 1

    def add_arguments(self, text: str) -> None:
        """Emit arguments of the call."""
        assert self._call is not None
        self._call.arguments.append(text)

    def end_call(self) -> None:
        """End the call. White space around it is content only between two texts."""
        call = self._call
        assert call is not None
        self._emit_arguments()
        self.found.append(Call(call.index, call.name, "".join(call.arguments)))
        self._call = self._taken = None
        if not self._has_content:
            self._space = ""

    def space_after_call(self) -> Steps[None]:
        """Read white space after end_call()."""
        space = yield from self.spaces()
        if self._has_content:
            self._space += space

    def keep(self, text: str = "") -> None:
        """Remember text from here on, after `text`, for not_a_call()."""
        self._taken = [text]

    def not_a_call(self) -> None:
        """Emit the text since keep() as content, with the white space before it."""
        text, self._taken = "".join(self._taken or ()), None
        if self._call is None:
            self.emit(text)
        else:
            self._emit_arguments()
            self.found.append(NoCall(self._call.index, self._space + text))
            self._call, self._space, self._has_content = None, "", True

    def fetch(self) -> list[Part]:
        """The parts found since the last call."""
        self._emit_arguments()
        found, self.found = self.found, []
        return found

    def _emit_arguments(self) -> None:
        call = self._call
        if call is not None and call.n_emitted < len(call.arguments):
            name = None if call.n_emitted else call.name
            text = "".join(call.arguments[call.n_emitted :])
            self.found.append(CallDelta(call.index, name, text))
            call.n_emitted = len(call.arguments)

    def more(self) -> Steps[bool]:
        """Wait for more text; False at the end."""
        if self.ended:
            return False
        yield
        return True

    def has(self, n: int) -> Steps[bool]:
        """Whether n more characters exist."""
        while len(self.rest) < n:
            if not (yield from self.more()):
                return False
        return True

    def peek(self) -> Steps[str]:
        """The next character without reading it; "" at the end."""
        return self.rest[0] if (yield from self.has(1)) else ""

    def take(self, n: int) -> str:
        """Read n characters, which must exist."""
        taken, self.rest = self.rest[:n], self.rest[n:]
        if self._taken is not None:
            self._taken.append(taken)
        return taken

    def run(
        self, characters: re.Pattern[str], out: Callable[[str], object] | None = None
    ) -> Steps[str]:
        """Read characters that match; out: receives them as they arrive."""
        taken: list[str] = []
        while True:
            match = characters.match(self.rest)
            if match and match[0]:
                (out or taken.append)(self.take(match.end()))
            if self.rest or not (yield from self.more()):
                return "".join(taken)

    def spaces(self) -> Steps[str]:
        """Read white space."""
        return (yield from self.run(_SPACES))

    def word(self) -> Steps[str]:
        """Read letters, digits and "_.-", such as a tool's name; may be empty."""
        return (yield from self.run(_WORD))

    def starts(self, marker: str) -> Steps[bool]:
        """Read the marker if the text continues with it; whether it does."""
        while not self.rest.startswith(marker):
            if not marker.startswith(self.rest) or not (yield from self.more()):
                return False
        self.take(len(marker))
        return True

    def skip(self, marker: str) -> Steps[bool]:
        """Does as starts(), but the marker may be incomplete where the text ends."""
        found = yield from self.starts(marker)
        if not found and self.ended and marker.startswith(self.rest):
            self.take(len(self.rest))
        return found

    def until(
        self, markers: Sequence[str], kind: type[Content] | type[Reasoning] = Content
    ) -> Steps[str | None]:
        """Emit text up to the first marker, read the marker and return it; None at the end.

        White space before the marker is content if more content follows, but not reasoning.
        """
        held = ""

        def out(text: str) -> None:
            nonlocal held
            text = held + text
            emitted = text.rstrip()
            held = text[len(emitted) :]
            self.emit(emitted, kind)

        marker = yield from self.up_to(markers, out)
        if marker is None:
            self.emit(held, kind)
        elif kind is Content:
            self._space += held
        return marker

    def up_to(self, markers: Sequence[str], out: Callable[[str], object]) -> Steps[str | None]:
        """Pass text up to the first marker to out(), read the marker and return it; None at the
        end."""
        while True:
            places = [(at, marker) for marker in markers if (at := self.rest.find(marker)) >= 0]
            at, marker = min(places, key=lambda place: (place[0], -len(place[1])), default=(-1, ""))
            # A longer or an earlier marker may still be incomplete.
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
        """The offset of an incomplete marker at the end of the text, or its length."""
        size = len(self.rest)
        for at in range(max(0, size - max(map(len, markers)) + 1), size):
            if any(m.startswith(self.rest[at:]) for m in markers):
                return at
        return size

    def remainder(self) -> Steps[None]:
        """Emit all remaining text."""
        while True:
            self.emit(self.take(len(self.rest)))
            if not (yield from self.more()):
                return
