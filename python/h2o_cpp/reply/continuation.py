"""Continuation: the parts of a reply whose beginning the prompt contains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from h2o_cpp.reply.scanner import Call, CallDelta, Content, NoCall, Part, Reasoning


class Continuation:
    """A reply without the text of its beginning. A call that begins there stays.

    A parser holds back text that may belong to a marker, so parts after the beginning may start
    with text of the beginning.
    """

    def __init__(self, before: Iterable[Part], whole: Iterable[Part]) -> None:
        """before: the parts emitted so far; whole: those of the beginning if nothing followed."""
        before = [*before]
        no_calls = {part.index for part in before if isinstance(part, NoCall)}
        self._calls = [
            part
            for part in before
            if isinstance(part, Call | CallDelta) and part.index not in no_calls
        ]
        self._held = {
            reasons: _text(whole, reasons)[len(_text(before, reasons)) :]
            for reasons in (False, True)
        }

    def rest(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The parts after the beginning."""
        yield from self._calls
        self._calls = []
        for part in parts:
            if isinstance(part, Content | Reasoning | NoCall):
                text = self._without_held(part.text, isinstance(part, Reasoning))
                if text or isinstance(part, NoCall):
                    yield replace(part, text=text)
            else:
                if isinstance(part, Call):  # what was held is its source, but for white space
                    held = self._held[False]
                    self._held[False] = held[: len(held) - len(held.lstrip())]
                yield part

    def _without_held(self, text: str, reasons: bool) -> str:
        held = self._held[reasons]
        if held.startswith(text):
            self._held[reasons] = held[len(text) :]
            return ""
        self._held[reasons] = ""
        return text.removeprefix(held)


def _text(parts: Iterable[Part], reasons: bool) -> str:
    return "".join(
        part.text
        for part in parts
        if isinstance(part, Content | Reasoning | NoCall) and isinstance(part, Reasoning) == reasons
    )
