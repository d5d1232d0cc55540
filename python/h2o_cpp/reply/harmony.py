"""Harmony, the format of gpt-oss: messages on channels (analysis, commentary with calls, final)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from h2o_cpp.reply.calls import Tools, read_arguments
from h2o_cpp.reply.rules import Rules
from h2o_cpp.reply.scanner import Content, Reasoning, Scanner, Steps

_CHANNEL, _START, _MESSAGE, _CONSTRAIN = "<|channel|>", "<|start|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (_CHANNEL, _START, _MESSAGE, _CONSTRAIN, *_ENDS)

_TO = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


def parse(s: Scanner, tools: Tools) -> Steps[None]:
    """Parse messages after <|start|>assistant, the end of the prompt; other text is content.

    Several messages of one kind are separated by line breaks.
    """
    begun: set[type[Content] | type[Reasoning]] = set()
    while True:
        header: list[str] = []
        if (yield from s.starts(" to=")):  # recipient before the channel
            header.append(" to=")
        else:
            marker = yield from s.until([_CHANNEL, _START])
            if marker is None:
                return
            header.append(marker)
        marker = yield from s.up_to([_MESSAGE], header.append)
        head = "".join(header)
        if marker is None:
            s.keep(head)
            s.not_a_call()
            return
        to = _TO.search(head)
        if to is None or not tools.any:
            thinks = to is None and f"{_CHANNEL}analysis" in head
            kind = Reasoning if thinks else Content
            if kind in begun:
                s.emit("\n", kind)
            begun.add(kind)
            marker = yield from s.until(_ENDS, kind)
        else:
            s.keep()
            marker = yield from _call(s, to[1])
        if marker is None:
            return


def _call(s: Scanner, name: str) -> Steps[str | None]:
    """Read a call up to the end of its message and return the end marker."""
    yield from s.spaces()
    if (yield from s.starts("<|call|>")):  # no arguments
        s.begin_call(name)
        s.add_arguments("{}")
        s.end_call()
        return "<|call|>"
    if (yield from read_arguments(s, name)):
        yield from s.spaces()
        for end in _ENDS:
            if (yield from s.starts(end)):
                s.end_call()
                return end
        if not (yield from s.peek()):
            s.end_call()
            return None
    s.not_a_call()
    return (yield from s.until(_ENDS))


def grammar(r: Rules) -> str:
    """A grammar of optional analysis and one call."""
    channel, message = r.marker(_CHANNEL), r.marker(_MESSAGE)

    def call(name: str, schema: Mapping[str, Any]) -> str:
        head = r.text(f"commentary to=functions.{name} ")
        json = f"{r.marker(_CONSTRAIN)} {r.text('json')} {message} {r.json(schema)}"
        return f"{channel} {head} {json} {r.marker('<|call|>')}"

    return f"{_analysis(r)} {r.one_call(call)}"


def before_form(r: Rules) -> str:
    """A grammar of optional analysis and the header of the final message."""
    return f"{_analysis(r)} {r.marker(_CHANNEL)} {r.text('final')} {r.marker(_MESSAGE)}"


def _analysis(r: Rules) -> str:
    head = f"{r.marker(_CHANNEL)} {r.text('analysis')} {r.marker(_MESSAGE)}"
    return f"({head} {r.up_to(*_ENDS)} {r.marker(_START)} {r.text('assistant')})?"
