"""JSON schemas in forms that llguidance implements and small models can follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_VALUES = ("const", "enum", "default", "examples")  # not schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")


# Keywords with parts that must allow each other's properties.
_COMBINED = {"allOf", "if", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"}
_OTHERS = {"patternProperties", "minProperties"}  # about properties that are not named
_COMBINED_BESIDE = {"anyOf", "oneOf", "$ref"}  # if properties are beside them


def without_defaults(schema: Any) -> Any:
    """The schema without `"uniqueItems": false`."""
    return _without(schema, lambda key, value: key == "uniqueItems" and value is False)


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema in which objects with properties have no others, as in llama.cpp: small models
    would invent them without end. Unchanged if parts of it are combined.
    """
    combined = False

    def close(one: dict[str, Any]) -> dict[str, Any]:
        nonlocal combined
        properties, required = one.get("properties"), one.get("required", [])
        combined = combined or bool(one.keys() & _COMBINED)
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return one
        combined = combined or bool(one.keys() & _COMBINED_BESIDE)
        if one.keys() & _OTHERS or any(not _has(properties, key) for key in required):
            return one
        return {"additionalProperties": False, **one}

    found: Mapping[str, Any] = _changed(schema, close)
    return schema if combined else found


def loosened(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Objects' schemas that allow more: first all texts, then all values of a property's type."""
    yield _without(schema, lambda key, _: key in ("pattern", "patternProperties"))
    given = schema.get("properties")
    properties = given if isinstance(given, Mapping) else {}
    required = schema.get("required")
    yield {
        "type": "object",
        "properties": {name: _type_of(one) for name, one in properties.items()},
        "required": [name for name in required if _has(properties, name)]
        if isinstance(required, list)
        else [],
        "additionalProperties": not properties,
    }


def _has(properties: Mapping[str, Any], name: Any) -> bool:
    return isinstance(name, str) and name in properties


def _type_of(schema: Any) -> dict[str, Any]:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return {"type": kind} if kind in _TYPES else {}


def _without(schema: Any, drops: Callable[[str, Any], bool]) -> Any:
    """The schema without some keywords."""

    def kept(one: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in one.items() if not drops(key, value)}

    return _changed(schema, kept)


def _changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with each of its schemas changed."""
    if isinstance(schema, list):
        return [_changed(one, change) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _VALUES:
            found[key] = value
        elif key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: _changed(one, change) for name, one in value.items()}
        else:
            found[key] = _changed(value, change)
    return change(found)
