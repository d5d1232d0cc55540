"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from h2o_cpp.reply.calls import Tools, read_call
from h2o_cpp.reply.rules import Rules
from h2o_cpp.reply.scanner import Scanner, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"
MARKERS = (_BEGIN, _END)


def parse(s: Scanner, tools: Tools) -> Steps[None]:
    """Content, with calls in it. A call without its end is one too."""
    while (yield from s.until([_BEGIN])) is not None:
        s.keep(_BEGIN)
        yield from s.spaces()
        if not tools.any or not (yield from read_call(s)):
            s.not_a_call()
            continue
        s.end_call()
        yield from s.spaces()
        if (yield from s.starts(_END)):
            yield from s.spaces()


def grammar(r: Rules) -> str:
    """What a reply must be that is calls alone."""

    def call(name: str, schema: Mapping[str, Any]) -> str:
        head = r.text(f'\n{{"name": {json.dumps(name)}, "arguments": ')
        end = r.text("}\n")
        return f"{r.marker(_BEGIN)} {head} {r.json(schema)} {end} {r.marker(_END)}"

    return r.calls(call, between=r.text("\n"))
