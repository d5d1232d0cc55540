"""GLM-4.5 to 4.7: name, <arg_key>key</arg_key> and <arg_value>value</arg_value> in <tool_call>."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from h2o_cpp.reply.calls import Tools, dumps
from h2o_cpp.reply.parameters import Parameter, parameter_of, parsed, rules_of
from h2o_cpp.reply.rules import Rules
from h2o_cpp.reply.scanner import Scanner, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
MARKERS = (_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END)


def parse(s: Scanner, tools: Tools) -> Steps[None]:
    """Parse content and calls."""
    while (yield from s.until([_BEGIN])) is not None:
        s.keep(_BEGIN)
        if not tools.any or not (yield from _call(s, tools)):
            s.not_a_call()
            continue
        s.end_call()
        yield from s.space_after_call()


def _call(s: Scanner, tools: Tools) -> Steps[bool]:
    """Read a call from the name up to </tool_call>."""
    yield from s.spaces()
    name = yield from s.word()
    if not name:
        return False
    yield from s.spaces()
    s.begin_call(name)
    s.add_arguments("{")
    between = ""
    while not (yield from s.starts(_END)):
        if not (yield from s.starts(_KEY)):
            return False
        given: list[str] = []
        if (yield from s.up_to([_KEY_END], given.append)) is None:
            return False
        yield from s.spaces()
        if not (yield from s.starts(_VALUE)):
            return False
        key = "".join(given).strip()
        s.add_arguments(f"{between}{dumps(key)}: ")
        between = ", "
        if not (yield from _argument(s, parameter_of(tools.schema(name), key))):
            return False
        yield from s.spaces()
    s.add_arguments("}")
    return True


def _argument(s: Scanner, kind: Parameter | None) -> Steps[bool]:
    """Read a value and emit it, text as it arrives; False if it has no end."""
    if kind is not None and kind.is_text:
        s.add_arguments('"')
        marker = yield from s.up_to([_VALUE_END], lambda text: s.add_arguments(dumps(text)[1:-1]))
        s.add_arguments('"')
        return marker is not None
    value: list[str] = []
    if (yield from s.up_to([_VALUE_END], value.append)) is None:
        return False
    s.add_arguments(dumps(parsed("".join(value), kind)))
    return True


def grammar(r: Rules) -> str:
    """A grammar of calls."""
    breaks = (f"{_KEY_END}\n", f"{_KEY_END}\\n")  # GLM-4.7 writes calls without
    line = r.text("\n") if any(one in r.template for one in breaks) else ""

    def parameter(key: str, kind: Parameter) -> str:
        head = f"{r.marker(_KEY)} {r.text(key)} {r.marker(_KEY_END)} {line} {r.marker(_VALUE)}"
        return f"{head} {kind.rule(r, _VALUE_END)} {line}"

    def call(name: str, schema: Mapping[str, Any]) -> str:
        parameters = rules_of(r, schema, parameter)
        return f"{r.marker(_BEGIN)} {r.text(name)} {line} {parameters} {r.marker(_END)}"

    return r.calls(call, between=line)
