"""Mistral: [TOOL_CALLS] and a list of {"name": ..., "arguments": {...}}, or name[ARGS]{...}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from h2o_cpp.reply.calls import Tools, read_arguments, read_call
from h2o_cpp.reply.rules import Rules
from h2o_cpp.reply.scanner import Scanner, Steps

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = (_BEGIN, _ID, _ARGUMENTS)


def parse(s: Scanner, tools: Tools) -> Steps[None]:
    """Parse content followed by calls."""
    while (yield from s.until([_BEGIN])) is not None:
        s.keep(_BEGIN)
        yield from s.spaces()
        name = yield from s.word()
        if not tools.any or not (yield from _call(s, name) if name else _list(s)):
            s.not_a_call()
            continue
        yield from s.space_after_call()


def _call(s: Scanner, name: str) -> Steps[bool]:
    for mark in (_ID, _ARGUMENTS):
        if (yield from s.starts(mark)):
            yield from s.word()
    yield from s.spaces()
    if not (yield from read_arguments(s, name)):
        return False
    s.end_call()
    return True


def _list(s: Scanner) -> Steps[bool]:
    """Read a list, or one call without a list. Calls before an invalid one count."""
    listed = yield from s.starts("[")
    while True:
        yield from s.spaces()
        if not (yield from read_call(s)):
            return False
        s.end_call()
        if not listed:
            return True
        s.keep()
        yield from s.spaces()
        if (yield from s.starts("]")):
            return True
        if not (yield from s.starts(",")):
            return False


def grammar(r: Rules) -> str:
    """A grammar of calls, in the form that the template uses."""
    begin = r.marker(_BEGIN)
    if _ARGUMENTS not in r.template:
        first = f"{begin} {r.text('[')}"
        return r.calls(r.json_call, begin=first, between=r.text(", "), end=r.text("]"))

    def call(name: str, schema: Mapping[str, Any]) -> str:
        return f"{begin} {r.text(name)} {r.marker(_ARGUMENTS)} {r.json(schema)}"

    return r.calls(call)
