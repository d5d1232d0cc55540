"""Parameters of calls that are written one by one: text without quotes or JSON, by their schema."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from h2o_cpp.reply.calls import loads
from h2o_cpp.reply.json_schema import target
from h2o_cpp.reply.rules import ANY_TEXT, Rules

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


def rules_of(r: Rules, schema: Mapping[str, Any], one: Callable[[str, Parameter], str]) -> str:
    """Rules for the parameters of a call in order; one(key, parameter) is one of them.

    Raises ValueError for a schema that cannot be followed.
    """
    rules = rules_by_key(r, schema, one).values()
    return " ".join(rule if required else f"({rule})?" for rule, required in rules)


def rules_by_key(
    r: Rules, schema: Mapping[str, Any], one: Callable[[str, Parameter], str]
) -> dict[str, tuple[str, bool]]:
    """The rule of each parameter, and whether it is required; arguments as for rules_of."""
    if r.strict and (unknown := sorted(schema.keys() - _KNOWN)):
        raise ValueError(f"{unknown[0]!r} is not supported in this format")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise ValueError("this is not a JSON Schema")
    keys = dict.fromkeys(map(str, [*properties, *required]))
    found = {}
    for key in keys:
        if not key or key != key.strip() or ">" in key:
            raise ValueError(f"{key!r} cannot be written in this format")
        rule = one(key, parameter_of(schema, key) or Parameter({}, {}))
        found[key] = rule, key in required
    return found


@dataclass(frozen=True)
class Parameter:
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
        return isinstance(values, list) and values != [] and all(isinstance(v, str) for v in values)

    def parsed(self, text: str) -> Any:
        """A value that is not is_text: JSON of a valid type, or else text if that is valid, or
        Python's spelling of JSON, which templates show models.
        """
        value, name, valid = loads(text), text.strip(), _types_in(self.schema, self.root)
        if value is not None or name == "null":
            fits = not valid.isdisjoint(_types_of(value))
            return value if fits or "string" not in valid else text
        if name == "None" and "null" in valid:
            return None
        return text if "string" in valid else _literal(name, text)

    def json(self, r: Rules) -> str:
        """A rule for the value as JSON."""
        schema = self.schema
        if schema is None:
            raise ValueError("a $ref does not exist")
        if not isinstance(schema, Mapping):
            schema = {} if schema else {"not": {}}
        definitions = {k: self.root[k] for k in ("$defs", "definitions") if k in self.root}
        return r.json({**definitions, **schema})

    def rule(self, r: Rules, end: str, never: Sequence[str] = ()) -> str:
        """A rule for the value and its end marker; never: what text must not have in it."""
        schema = self.schema
        if schema is None:
            raise ValueError("a $ref does not exist")
        if not self.is_text:
            return f"{self.json(r)} {r.marker(end)}"
        if r.strict and (unknown := sorted(schema.keys() - _KNOWN_OF_TEXT)):
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
            return f"({' | '.join(f'{r.text(one)} {r.marker(end)}' for one in values)})"
        patterns = [ANY_TEXT]
        if "minLength" in schema or "maxLength" in schema:
            least, most = schema.get("minLength", 0), schema.get("maxLength")
            if not isinstance(least, int) or not isinstance(most, int | None):
                raise ValueError("the minLength or maxLength of a parameter is not a number")
            patterns = [rf"[\s\S]{{{least},{'' if most is None else most}}}"]
        if "pattern" in schema:
            r.check({"pattern": schema["pattern"]})
            patterns.append(_pattern(str(schema["pattern"])))
        return r.matching(patterns, end, *never)


def _pattern(pattern: str) -> str:
    """A pattern that matches the whole text, from one that matches somewhere in it."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inside = pattern[begins : -1 if ends else None]
    if "|" in inside and begins + ends:  # each anchor of ^a|b$ belongs to one alternative
        begins = ends = False
        inside = pattern
    slashes = re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", inside).replace("\n", r"\n")
    return f"{'' if begins else ANY_TEXT}(?:{slashes}){'' if ends else ANY_TEXT}"


def parsed(text: str, parameter: Parameter | None) -> Any:
    """A value of a parameter that is not is_text; without a schema, JSON but strings in quotes."""
    if parameter is not None:
        return parameter.parsed(text)
    value = loads(text)
    is_json = value is not None or text.strip() == "null"
    return value if is_json and not isinstance(value, str) else text


def _types_of(value: Any) -> tuple[str, ...]:
    """The types of a JSON value in schemas."""
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("number",)
        case str():
            return ("string",)
    return ("array",) if isinstance(value, list) else ("object",)


def _literal(text: str, otherwise: str) -> Any:
    """A literal of Python that is one of JSON, too."""
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return otherwise
    return value


def parameter_of(schema: Any, key: str) -> Parameter | None:
    """A parameter, by the schema of the arguments; None if the schema does not have it."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping) or key not in properties:
        return None
    return Parameter(_resolved(properties[key], schema), schema)


def _types_in(schema: Any, root: Any) -> set[str]:
    """The types that a schema names, also in branches. Schemas may be cyclic or invalid."""
    found: set[str] = set()
    todo, seen = [schema], set()
    while todo:
        one = _resolved(todo.pop(), root)
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        if (types := one.get("type")) is not None:
            listed = types if isinstance(types, list) else [types]
            found.update(name for name in listed if isinstance(name, str))
            continue
        for branches in (one.get("anyOf"), one.get("oneOf")):
            todo += branches if isinstance(branches, list) else ()
    return found


def _resolved(schema: Any, root: Any) -> Any:
    """Returns the schema that a schema refers to."""
    for _ in range(8):  # references may be cyclic
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        schema = target(root, schema["$ref"])
    return schema
