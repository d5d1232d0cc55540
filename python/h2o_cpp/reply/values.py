"""Values of parameters: text without quotes, or JSON, depending on the schema."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from h2o_cpp.reply.rules import ANY_TEXT, Rules, check_schema, ends_with

_TEXT = {  # keywords of a text's schema that its rule follows or may ignore
    *("type", "enum", "const", "pattern", "minLength", "maxLength"),
    *("format", "title", "description", "default", "examples", "$comment"),
}


@dataclass(frozen=True)
class Value:
    """A parameter's schema; references are resolved in `root`."""

    schema: Any
    root: Any = None

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

    def rule(self, r: Rules, end: str, never: Collection[str]) -> str:
        """A rule for the value and its end marker; `never`: texts that must not occur in it."""
        schema = self.schema
        if schema is None:
            raise ValueError("a $ref does not exist")
        if not self.is_text:
            if not isinstance(schema, Mapping):
                schema = {} if schema else {"not": {}}
            return f"{r.json({**_definitions(self.root), **schema})} {r.text(end)}"
        if r.strict and (unknown := sorted(schema.keys() - _TEXT)):
            raise ValueError(
                f"a string parameter has {unknown[0]!r}, which this format does not support"
            )
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            marks = (end, *never)
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
        return r.terminal(ends_with(patterns, end, never))


def _pattern(pattern: str) -> str:
    """A pattern that matches the whole text, from one that matches somewhere in it."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inside = pattern[begins : -1 if ends else None]
    if "|" in inside and begins + ends:  # each anchor of ^a|b$ belongs to one alternative
        begins = ends = False
        inside = pattern
    slashes = re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", inside).replace("\n", r"\n")
    return f"{'' if begins else ANY_TEXT}(?:{slashes}){'' if ends else ANY_TEXT}"


def value_of(schema: Any, key: str) -> Value | None:
    """A parameter, by the schema of the arguments; None if the schema does not have it."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping) or key not in properties:
        return None
    found = properties[key]
    for _ in range(8):  # references may be cyclic
        if not isinstance(found, Mapping) or not isinstance(found.get("$ref"), str):
            break
        found = _resolve(schema, found["$ref"])
    return Value(found, schema)


def _resolve(root: Any, reference: str) -> Any:
    if not reference.startswith("#/"):
        return None
    found = root
    for name in reference[2:].split("/"):
        if not isinstance(found, Mapping):
            return None
        found = found.get(name.replace("~1", "/").replace("~0", "~"))
    return found


def _definitions(root: Any) -> dict[str, Any]:
    names = ("$defs", "definitions") if isinstance(root, Mapping) else ()
    return {name: root[name] for name in names if name in root}
