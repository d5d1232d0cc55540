"""Qwen3-Coder: <function=name><parameter=key>value</parameter></function> in <tool_call>."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from h2o_cpp.reply.calls import Tools, dumps, loads
from h2o_cpp.reply.rules import ANY_TEXT, Rules, check_schema, ends_with
from h2o_cpp.reply.scanner import Scanner, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_VALUE_END, _FUNCTION_END = "</parameter>", "</function>"
_VALUE_ENDS = (_VALUE_END, _PARAMETER, _FUNCTION_END)
_NEVER = (_PARAMETER, _FUNCTION_END)  # in a value that is text
MARKERS = (_BEGIN, _END)

# Keywords of an object's schema that the grammar of its parameters follows or may ignore.
_KNOWN = {
    *("type", "properties", "required", "additionalProperties"),
    *("$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "examples"),
}
# Those of a string parameter.
_KNOWN_OF_TEXT = {
    *("type", "enum", "const", "pattern", "minLength", "maxLength"),
    *("format", "title", "description", "default", "examples", "$comment"),
}


def parse(s: Scanner, tools: Tools) -> Steps[None]:
    """Parse content and calls. The first <tool_call> may be missing."""
    while (marker := (yield from s.until([_BEGIN, _FUNCTION]))) is not None:
        s.keep(marker)
        begins = marker == _FUNCTION
        if not begins:
            yield from s.spaces()
            begins = yield from s.starts(_FUNCTION)
        if not begins or not tools.any or not (yield from _call(s, tools)):
            s.not_a_call()
            continue
        s.end_call()
        yield from s.space_after_call()
        if (yield from s.skip(_END)):
            yield from s.space_after_call()


def _call(s: Scanner, tools: Tools) -> Steps[bool]:
    """Read a call from the name up to </function>."""
    given: list[str] = []
    if (yield from s.up_to([">", _FUNCTION_END], given.append)) != ">":
        return False
    name = "".join(given).strip()
    if not name:
        return False
    s.begin_call(name)
    s.add_arguments("{")
    schema = tools.schema(name)
    between = ""
    marker = yield from s.up_to([_PARAMETER, _FUNCTION_END], lambda _: None)
    while marker == _PARAMETER:
        given = []
        if (yield from s.up_to([">", _PARAMETER, _FUNCTION_END], given.append)) != ">":
            return False
        key = "".join(given).strip()
        s.add_arguments(f"{between}{dumps(key)}: ")
        between = ", "
        marker = yield from _argument(s, _value_of(schema, key))
    if marker is None:  # cut: the arguments must not look complete
        return False
    s.add_arguments("}")
    return True


def _argument(s: Scanner, kind: _Value | None) -> Steps[str | None]:
    """Read a value and emit it, text as it arrives; return the marker after it. Of several ends the
    last one counts. A line break at each end of the value is not part of it.
    """
    is_text = kind is not None and kind.is_text
    value: list[str] = []
    after: list[str] | None = None  # an end marker, and text after it
    begun = False

    def emit() -> None:
        nonlocal begun
        text = "".join(value)
        if text and not begun:
            begun, text = True, text.removeprefix("\n")
        value[:] = ["\n"] if text.endswith("\n") else []
        s.add_arguments(dumps(text.removesuffix("\n"))[1:-1])

    def out(text: str) -> None:
        if after is not None:
            after.append(text)
            return
        value.append(text)
        if is_text:
            emit()

    if is_text:
        s.add_arguments('"')
    marker = yield from s.up_to(_VALUE_ENDS, out)
    while marker == _VALUE_END:
        if after is not None:
            found, after = [_VALUE_END, *after], None
            out("".join(found))
        after = []
        marker = yield from s.up_to(_VALUE_ENDS, out)
    if marker is None:
        return None
    if is_text:
        s.add_arguments('"')
    else:
        text = "".join(value).removeprefix("\n").removesuffix("\n")
        s.add_arguments(dumps(_parsed(text, kind)))
    return marker


def _parsed(text: str, kind: _Value | None) -> Any:
    """JSON if it is valid, otherwise text; without a schema, quoted strings are text too."""
    value = loads(text)
    if (value is None and text.strip() != "null") or (kind is None and isinstance(value, str)):
        return text
    return value


def grammar(r: Rules) -> str:
    """A grammar of calls.

    It also allows JSON strings with </parameter>, <parameter= or </function>, which parse() reads
    differently.
    """

    def call(name: str, schema: Mapping[str, Any]) -> str:
        begin, end = r.text(f"\n{_FUNCTION}{name}>\n"), r.text(f"{_FUNCTION_END}\n")
        parameters = _parameters(r, schema)
        return f"{r.marker(_BEGIN)} {begin} {parameters} {end} {r.marker(_END)}"

    return r.calls(call, between=r.text("\n"))


def _parameters(r: Rules, schema: Mapping[str, Any]) -> str:
    if r.strict and (unknown := sorted(schema.keys() - _KNOWN)):
        raise ValueError(f"{unknown[0]!r} is not supported in this format")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise ValueError("this is not a JSON Schema")
    keys = dict.fromkeys(map(str, [*properties, *required]))
    found = []
    for key in keys:
        if not key or key != key.strip() or ">" in key:
            raise ValueError(f"{key!r} cannot be written in this format")
        begin = r.text(f"{_PARAMETER}{key}>\n")
        value = _value_of(schema, key) or _Value({}, {})
        one = f"{begin} {value.rule(r)}"
        found.append(one if key in required else f"({one})?")
    return " ".join(found)


@dataclass(frozen=True)
class _Value:
    """A parameter's schema; references are resolved in `root`. Values are text without quotes, or
    JSON, depending on the schema.
    """

    schema: Any
    root: Mapping[str, Any]

    @property
    def is_text(self) -> bool:
        """Whether only strings are valid."""
        schema = self.schema
        if not isinstance(schema, Mapping):
            return False
        if "type" in schema:
            return bool(schema["type"] == "string")
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        return bool(values) and all(isinstance(value, str) for value in values)

    def rule(self, r: Rules) -> str:
        """A rule for the value and its end marker."""
        schema, end = self.schema, f"\n{_VALUE_END}\n"
        if schema is None:
            raise ValueError("a $ref does not exist")
        if not self.is_text:
            if not isinstance(schema, Mapping):
                schema = {} if schema else {"not": {}}
            definitions = {k: self.root[k] for k in ("$defs", "definitions") if k in self.root}
            return f"{r.json({**definitions, **schema})} {r.text(end)}"
        if r.strict and (unknown := sorted(schema.keys() - _KNOWN_OF_TEXT)):
            raise ValueError(
                f"a string parameter has {unknown[0]!r}, which this format does not support"
            )
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            marks = (end, *_NEVER)
            values = [
                one
                for one in values
                if isinstance(one, str) and not any(mark in one for mark in marks)
            ]
            if not values:
                raise ValueError("no value of an enum can be written in this format")
            return f"({' | '.join(r.text(one + end) for one in values)})"
        patterns = [ANY_TEXT]
        if "minLength" in schema or "maxLength" in schema:
            least, most = schema.get("minLength", 0), schema.get("maxLength")
            if not isinstance(least, int) or not isinstance(most, int | None):
                raise ValueError("the minLength or maxLength of a parameter is not a number")
            patterns = [rf"[\s\S]{{{least},{'' if most is None else most}}}"]
        if "pattern" in schema:
            check_schema({"pattern": schema["pattern"]})
            patterns.append(_pattern(str(schema["pattern"])))
        return r.terminal(ends_with(patterns, end, _NEVER))


def _pattern(pattern: str) -> str:
    """A pattern that matches the whole text, from one that matches somewhere in it."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inside = pattern[begins : -1 if ends else None]
    if "|" in inside and begins + ends:  # each anchor of ^a|b$ belongs to one alternative
        begins = ends = False
        inside = pattern
    slashes = re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", inside).replace("\n", r"\n")
    return f"{'' if begins else ANY_TEXT}(?:{slashes}){'' if ends else ANY_TEXT}"


def _value_of(schema: Any, key: str) -> _Value | None:
    """A parameter, by the schema of the arguments; None if the schema does not have it."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping) or key not in properties:
        return None
    found = properties[key]
    for _ in range(8):  # references may be cyclic
        if not isinstance(found, Mapping) or not isinstance(found.get("$ref"), str):
            break
        found = _resolve(schema, found["$ref"])
    return _Value(found, schema)


def _resolve(root: Any, reference: str) -> Any:
    if not reference.startswith("#/"):
        return None
    found = root
    for name in reference[2:].split("/"):
        if not isinstance(found, Mapping):
            return None
        found = found.get(name.replace("~1", "/").replace("~0", "~"))
    return found
