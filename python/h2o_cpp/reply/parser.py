"""ReplyParser: splits a reply's text into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from h2o_cpp.reply.calls import Tools
from h2o_cpp.reply.continuation import Continuation
from h2o_cpp.reply.formats import ReplyFormat
from h2o_cpp.reply.scanner import Call, Content, NoCall, Part, Reasoning, Scanner, Steps

_AT_ONCE = 1024  # characters per step, as taking some copies the rest


@dataclass(frozen=True)
class ToolCall:
    """A tool call; arguments: a JSON object as text."""

    name: str
    arguments: str


@dataclass
class Reply:
    """A complete reply; generation: the Generation that it was parsed from, if there is one."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    generation: Any = field(default=None, compare=False, repr=False)

    def add(self, parts: Iterable[Part]) -> None:
        """Append parts."""
        for part in parts:
            if isinstance(part, Call):
                self.calls.append(ToolCall(part.name, part.arguments))
            elif isinstance(part, Reasoning):
                self.reasoning += part.text
            elif isinstance(part, Content | NoCall):
                self.content += part.text


class ReplyParser:
    """Parses a reply incrementally. Malformed parts are content.

    Parts are emitted as soon as possible: of a call its name, once its arguments begin, then the
    arguments. A call that turns out to be malformed becomes content; see CallDelta.
    """

    def __init__(
        self,
        format: ReplyFormat,
        *,
        tools: Collection[str] | None = None,
        thinking: bool = False,
        begun: str = "",
    ) -> None:
        """format: from format_of(), for the model's chat template.

        tools: names of the tools in the prompt, or their schemas by name, which determine the types
            of values in formats without quotes. None: any tool.
        thinking: the prompt ends inside reasoning, so the reply begins there.
        begun: the beginning of the reply, which the prompt contains. It decides how the rest is
            parsed, but only a call that begins in it is emitted.
        """
        if not isinstance(format, ReplyFormat):
            raise TypeError(f"format={format!r}, expected a ReplyFormat, as from format_of()")
        self._scanner = Scanner()
        self._steps = _steps(self._scanner, format, Tools(tools), thinking and not begun)
        self._continuation: Continuation | None = None
        next(self._steps, None)
        if begun:
            alone = ReplyParser(format, tools=tools)
            whole = [*alone.push(begun), *alone.finish()]
            self._continuation = Continuation(self.push(begun), whole)

    def push(self, text: str) -> list[Part]:
        """Parse another piece of text."""
        for begin in range(0, len(text), _AT_ONCE):
            self._scanner.rest += text[begin : begin + _AT_ONCE]
            next(self._steps, None)
        return self._fetch()

    def finish(self) -> list[Part]:
        """Parse the rest at the end of the text."""
        self._scanner.ended = True
        next(self._steps, None)
        return self._fetch()

    def _fetch(self) -> list[Part]:
        found = self._scanner.fetch()
        return found if self._continuation is None else [*self._continuation.rest(found)]


def parse_reply(
    text: str,
    format: ReplyFormat,
    *,
    tools: Collection[str] | None = None,
    thinking: bool = False,
    begun: str = "",
) -> Reply:
    """Parse a complete reply; arguments as for ReplyParser."""
    parser = ReplyParser(format, tools=tools, thinking=thinking, begun=begun)
    reply = Reply()
    reply.add(parser.push(text))
    reply.add(parser.finish())
    return reply


def _steps(s: Scanner, format: ReplyFormat, tools: Tools, thinking: bool) -> Steps[None]:
    if format.think is not None:
        yield from _reasoning(s, *format.think, thinking)
    if format.parse is not None:
        yield from format.parse(s, tools)
    yield from s.remainder()


def _reasoning(s: Scanner, begin: str, end: str, opened: bool) -> Steps[None]:
    if not opened:
        spaces = yield from s.spaces()
        if not (yield from s.starts(begin)):
            s.rest = spaces + s.rest
            return
    yield from s.spaces()
    marker = yield from s.until([end], Reasoning)
    if marker is not None:
        yield from s.spaces()
