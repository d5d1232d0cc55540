"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from h2o_cpp.reply.calls import Tools, read_call
from h2o_cpp.reply.rules import Rules
from h2o_cpp.reply.scanner import Scanner, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"
MARKERS = (_BEGIN, _END)


def parse(s: Scanner, tools: Tools) -> Steps[None]:
    """Parse content and calls. The end of a call may be missing."""
    while (yield from s.until([_BEGIN])) is not None:
        s.keep(_BEGIN)
        yield from s.spaces()
        if not tools.any or not (yield from read_call(s)):
            s.not_a_call()
            continue
        s.end_call()
        yield from s.space_after_call()
        if (yield from s.skip(_END)):
            yield from s.space_after_call()


def grammar(r: Rules) -> str:
    """A grammar of calls."""
    begin, line, end = r.marker(_BEGIN), r.text("\n"), r.marker(_END)

    def call(name: str, schema: Mapping[str, Any]) -> str:
        return f"{begin} {line} {r.json_call(name, schema)} {line} {end}"

    return r.calls(call, between=line)
