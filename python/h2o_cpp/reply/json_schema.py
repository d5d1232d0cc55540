"""JSON schemas without what llguidance does not implement and has no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VALUES = ("const", "enum", "default", "examples")  # not schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def without_defaults(schema: Any) -> Any:
    """The schema without `"uniqueItems": false`."""
    if isinstance(schema, list):
        return [without_defaults(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _VALUES:
            found[key] = value
        elif key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: without_defaults(one) for name, one in value.items()}
        elif key != "uniqueItems" or value is not False:
            found[key] = without_defaults(value)
    return found
