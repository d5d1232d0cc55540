"""Gemma 4: call:name{key:value} in <|tool_call>, texts in <|"|>; reasoning in <|channel>thought."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from h2o_cpp.reply.calls import Tools, dumps
from h2o_cpp.reply.json_text import Out, read_value
from h2o_cpp.reply.parameters import Parameter, rules_by_key
from h2o_cpp.reply.rules import Rules
from h2o_cpp.reply.scanner import Reasoning, Scanner, Steps

_BEGIN, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CHANNEL, _CHANNEL_END = "<|channel>", "<channel|>"
MARKERS = (_BEGIN, _END, _QUOTE, _CHANNEL, _CHANNEL_END)

_MAX_NESTED = 64
_KEY = re.compile(r"[^:{}\[\],<]*")


def parse(s: Scanner, tools: Tools) -> Steps[None]:
    """Parse reasoning, content and calls, in any order. The end of a call may be missing."""
    while (marker := (yield from s.until([_BEGIN, _CHANNEL]))) is not None:
        if marker == _CHANNEL:
            yield from s.word()
            yield from s.spaces()
            if (yield from s.until([_CHANNEL_END], Reasoning)) is not None:
                yield from s.spaces()
            continue
        s.keep(_BEGIN)
        if not tools.any or not (yield from _call(s)):
            s.not_a_call()
            continue
        s.end_call()
        yield from s.space_after_call()
        if (yield from s.skip(_END)):
            yield from s.space_after_call()


def _call(s: Scanner) -> Steps[bool]:
    """Read a call from "call:" up to its last brace."""
    yield from s.spaces()
    if not (yield from s.starts("call:")):
        return False
    name = yield from s.word()
    if not name or (yield from s.peek()) != "{":
        return False
    s.begin_call(name)
    return (yield from _value(s, s.add_arguments, _MAX_NESTED))


def _value(s: Scanner, out: Out, nested: int) -> Steps[bool]:
    """Read a value and pass it on as JSON; False if it is invalid. Texts may be JSON's, too."""
    if (yield from s.starts(_QUOTE)):
        out('"')
        marker = yield from s.up_to([_QUOTE], lambda text: out(dumps(text)[1:-1]))
        out('"')
        return marker is not None
    begin = yield from s.peek()
    if begin == "{" and nested > 0:
        return (yield from _list(s, out, "}", lambda: _member(s, out, nested - 1)))
    if begin == "[" and nested > 0:
        return (yield from _list(s, out, "]", lambda: _value(s, out, nested - 1)))
    return (yield from read_value(s, out, 0))


def _member(s: Scanner, out: Out, nested: int) -> Steps[bool]:
    """Read a key, which may have quotes, and its value."""
    begin = yield from s.peek()
    if begin in ("<", '"'):
        if not (yield from _value(s, out, 0)):
            return False
    else:
        key = (yield from s.run(_KEY)).strip()
        if not key:
            return False
        out(dumps(key))
    yield from s.spaces()
    if not (yield from s.starts(":")):
        return False
    out(": ")
    yield from s.spaces()
    return (yield from _value(s, out, nested))


def _list(s: Scanner, out: Out, end: str, one: Callable[[], Steps[bool]]) -> Steps[bool]:
    out(s.take(1))
    yield from s.spaces()
    ended = yield from s.starts(end)
    while not ended:
        if not (yield from one()):
            return False
        yield from s.spaces()
        ended = yield from s.starts(end)
        if not ended:
            if not (yield from s.starts(",")):
                return False
            out(", ")
            yield from s.spaces()
    out(end)
    return True


def grammar(r: Rules) -> str:
    """A grammar of optional reasoning and calls. Values other than texts are JSON."""

    def parameter(key: str, kind: Parameter) -> str:
        if not _KEY.fullmatch(key) or key.startswith('"'):
            raise ValueError(f"{key!r} cannot be written in this format")
        if kind.is_text:
            return f"{r.text(f'{key}:')} {r.marker(_QUOTE)} {kind.rule(r, _QUOTE)}"
        return f"{r.text(f'{key}:')} {kind.json(r)}"

    def call(name: str, schema: Mapping[str, Any]) -> str:
        rules = rules_by_key(r, schema, parameter)
        parameters = _separated(r, [rules[key] for key in sorted(rules, key=str.lower)])
        head = f"{r.marker(_BEGIN)} {r.text(f'call:{name}' + '{')}"
        return f"{head} {parameters} {r.text('}')} {r.marker(_END)}"

    return f"{before_form(r)} {r.calls(call)}"


def before_form(r: Rules) -> str:
    """A grammar of optional reasoning."""
    return f"({r.marker(_CHANNEL)} {r.text('thought')} {r.up_to(_CHANNEL_END)})?"


def _separated(r: Rules, rules: list[tuple[str, bool]]) -> str:
    """The rules in order, separated by commas; those that are not required may be absent."""
    comma = r.text(",")
    first, more = "", ""  # what may follow if nothing has been written, and otherwise
    for rule, required in reversed(rules):
        begin = f"{rule} {more}"
        first = begin if required else f"({begin} | {first})" if first else f"({begin})?"
        more = f"{comma} {rule} {more}" if required else f"({comma} {rule})? {more}"
    return first
