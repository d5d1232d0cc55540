"""JSON schemas without what llguidance does not implement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_VALUES = ("const", "enum", "default", "examples")  # not schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")


def without_defaults(schema: Any) -> Any:
    """The schema without `"uniqueItems": false`."""
    return _without(schema, lambda key, value: key == "uniqueItems" and value is False)


def loosened(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Objects' schemas that allow more: first all texts, then all values of a property's type."""
    yield _without(schema, lambda key, _: key in ("pattern", "patternProperties"))
    given = schema.get("properties")
    properties = given if isinstance(given, Mapping) else {}
    required = schema.get("required")
    yield {
        "type": "object",
        "properties": {name: _type_of(one) for name, one in properties.items()},
        "required": [name for name in required if name in [*properties]]
        if isinstance(required, list)
        else [],
        "additionalProperties": not properties,
    }


def _type_of(schema: Any) -> dict[str, Any]:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return {"type": kind} if kind in _TYPES else {}


def _without(schema: Any, drops: Callable[[str, Any], bool]) -> Any:
    """The schema without some keywords."""
    if isinstance(schema, list):
        return [_without(one, drops) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if drops(key, value):
            continue
        if key in _VALUES:
            found[key] = value
        elif key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: _without(one, drops) for name, one in value.items()}
        else:
            found[key] = _without(value, drops)
    return found
