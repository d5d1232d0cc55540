"""Harmony, of gpt-oss: messages on channels: analysis, commentary, to which calls belong, final."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from h2o_cpp.reply.calls import Tools, dumps, loads
from h2o_cpp.reply.rules import Rules
from h2o_cpp.reply.scanner import Content, Reasoning, Scanner, Steps

_CHANNEL, _START, _MESSAGE, _CONSTRAIN = "<|channel|>", "<|start|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (_CHANNEL, _START, _MESSAGE, _CONSTRAIN, *_ENDS)

_TO = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


def parse(s: Scanner, tools: Tools) -> Steps[None]:
    """Messages from <|start|>assistant on, which the prompt ends with. What is outside them is
    content."""
    while True:
        if (yield from s.starts(" to=")):  # whom a call is to, before its channel
            header = " to="
        else:
            _, marker = yield from s.until([_CHANNEL, _START])
            if marker is None:
                return
            header = marker
        rest, marker = yield from s.until([_MESSAGE], None)
        header += rest
        if marker is None:
            s.not_a_call(header)
            return
        to = _TO.search(header)
        if to is None:
            kind = Reasoning if f"{_CHANNEL}analysis" in header else Content
            _, marker = yield from s.until(_ENDS, kind)
        else:
            body = (yield from s.json_value()) or ""  # in which an end may be spelled
            rest, marker = yield from s.until(_ENDS, None)
            body += rest
            arguments = loads(body)
            if isinstance(arguments, dict) and tools.any:
                s.call(to[1], dumps(arguments))
            else:
                s.not_a_call(body)
        if marker is None:
            return


def demand(r: Rules) -> str:
    """What a reply must be that thinks, perhaps, and calls a tool."""
    channel, message = r.marker(_CHANNEL), r.marker(_MESSAGE)

    def call(name: str, schema: Mapping[str, Any]) -> str:
        head = r.text(f"commentary to=functions.{name} ")
        json = f"{r.marker(_CONSTRAIN)} {r.text('json')} {message} {r.json(schema)}"
        return f"{channel} {head} {json} {r.marker('<|call|>')}"

    thought = r.up_to(*_ENDS)
    analysis = f"{channel} {r.text('analysis')} {message} {thought}"
    return f"({analysis} {r.marker(_START)} {r.text('assistant')})? {r.one_call(call)}"
