"""Mistral: [TOOL_CALLS] and a list of {"name": ..., "arguments": {...}}, or name[ARGS]{...}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from h2o_cpp.reply.calls import Tools, dumps, loads, read_call
from h2o_cpp.reply.rules import Rules
from h2o_cpp.reply.scanner import Scanner, Steps

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = (_BEGIN, _ID, _ARGUMENTS)


def parse(s: Scanner, tools: Tools) -> Steps[None]:
    """Content, with calls after it."""
    while True:
        _, marker = yield from s.until([_BEGIN])
        if marker is None:
            return
        text = _BEGIN + (yield from s.spaces())
        name = yield from s.word()
        text += name
        if name:
            for mark in (_ID, _ARGUMENTS):
                if (yield from s.starts(mark)):
                    text += mark + (yield from s.word())
            text += yield from s.spaces()
        raw = yield from s.json_value()
        calls = None if raw is None else _read(name, raw)
        if not calls or not tools.any:
            s.not_a_call(text + (raw or ""))
            continue
        for call in calls:
            s.call(*call)
        yield from s.spaces()


def _read(name: str, raw: str) -> list[tuple[str, str]] | None:
    value = loads(raw)
    if name:
        return [(name, dumps(value))] if isinstance(value, dict) else None
    found = [read_call(one) for one in (value if isinstance(value, list) else [value])]
    calls = [call for call in found if call is not None]
    return calls if len(calls) == len(found) else None


def demand(r: Rules) -> str:
    """What a reply must be that is calls alone, in the form that the template has."""
    begin = r.marker(_BEGIN)

    def named(name: str, schema: Mapping[str, Any]) -> str:
        return f"{begin} {r.text(name)} {r.marker(_ARGUMENTS)} {r.json(schema)}"

    def listed(name: str, schema: Mapping[str, Any]) -> str:
        head = r.text(f'{{"name": {json.dumps(name)}, "arguments": ')
        return f"{head} {r.json(schema)} {r.text('}')}"

    if _ARGUMENTS in r.template:
        return r.calls(named)
    return r.calls(listed, begin=f"{begin} {r.text('[')}", between=r.text(", "), end=r.text("]"))
