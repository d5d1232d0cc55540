"""Qwen3-Coder: <function=name><parameter=key>value</parameter></function> in <tool_call>."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from h2o_cpp.reply.calls import Tools, dumps, loads
from h2o_cpp.reply.rules import Rules
from h2o_cpp.reply.scanner import Scanner, Steps
from h2o_cpp.reply.values import Value, value_of

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_VALUE_END, _FUNCTION_END = "</parameter>", "</function>"
MARKERS = (_BEGIN, _END)

# Of an object's schema, what the grammar of its parameters follows or may ignore.
_KNOWN = {
    *("type", "properties", "required", "additionalProperties"),
    *("$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "examples"),
}


def parse(s: Scanner, tools: Tools) -> Steps[None]:
    """Content, with calls in it. The first <tool_call> is sometimes left out."""
    while True:
        _, marker = yield from s.until([_BEGIN, _FUNCTION])
        if marker is None:
            return
        text = marker
        if marker == _BEGIN:
            text += yield from s.spaces()
            if not (yield from s.starts(_FUNCTION)):
                s.not_a_call(text)
                continue
            text += _FUNCTION
        inside, end = yield from s.until([_FUNCTION_END], None)
        call = _read(inside, tools) if end else None
        if call is None or not tools.any:
            s.not_a_call(text + inside + (end or ""))
            continue
        s.call(*call)
        yield from s.spaces()
        if (yield from s.starts(_END)):
            yield from s.spaces()


def _read(inside: str, tools: Tools) -> tuple[str, str] | None:
    name, begin, rest = inside.partition(">")
    name = name.strip()
    if not begin or not name:
        return None
    schema = tools.schema(name)
    arguments: dict[str, Any] = {}
    for part in rest.split(_PARAMETER)[1:]:
        key, _, value = part.partition(">")
        key = key.strip()
        value = value.rpartition(_VALUE_END)[0] if _VALUE_END in value else value
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = _value(value, value_of(schema, key))
    return name, dumps(arguments)


def _value(text: str, kind: Value | None) -> Any:
    """Text where the schema says so, JSON where it is valid; without a schema, strings in quotes
    are text too."""
    if kind is not None and kind.is_text:
        return text
    value = loads(text)
    if (value is None and text.strip() != "null") or (kind is None and isinstance(value, str)):
        return text
    return value


def demand(r: Rules) -> str:
    """What a reply must be that is calls alone. JSON in which a string spells </parameter>,
    <parameter= or </function> is the one thing that parse() reads otherwise."""

    def call(name: str, schema: Mapping[str, Any]) -> str:
        begin, end = r.text(f"\n{_FUNCTION}{name}>\n"), r.text(f"{_FUNCTION_END}\n")
        parameters = _parameters(r, name, schema)
        return f"{r.marker(_BEGIN)} {begin} {parameters} {end} {r.marker(_END)}"

    return r.calls(call, between=r.text("\n"))


def _parameters(r: Rules, name: str, schema: Mapping[str, Any]) -> str:
    unknown = sorted(schema.keys() - _KNOWN)
    if unknown:
        raise ValueError(
            f"the parameters of {name} have {unknown[0]!r}, which calls in this format cannot be "
            "made to follow: expected an object's properties"
        )
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise ValueError(f"the parameters of {name} are not a schema")
    keys = dict.fromkeys(map(str, [*properties, *required]))
    found = []
    for key in keys:
        if not key or key != key.strip() or ">" in key:
            raise ValueError(f"the parameter {key!r} of {name} cannot be written in this format")
        begin = r.text(f"{_PARAMETER}{key}>\n")
        value = value_of(schema, key) or Value({})
        end = f"\n{_VALUE_END}\n"
        one = f"{begin} {value.rule(r, end, (_PARAMETER, _FUNCTION_END))}"
        found.append(one if key in required else f"({one})?")
    return " ".join(found)
