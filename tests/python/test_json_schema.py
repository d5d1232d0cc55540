"""Schemas whose objects have only the properties that they name."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_cpp.reply.json_schema import closed

OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED = {**OPEN, "additionalProperties": False}
OTHER: dict[str, Any] = {"properties": {"b": {}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": OPEN}},
            {"$ref": "#/$defs/x", "$defs": {"x": CLOSED}},
        ),
        (
            {"properties": {"properties": OPEN}},
            {"properties": {"properties": CLOSED}, "additionalProperties": False},
        ),
    ],
)
def test_objects_with_properties_are_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {**OPEN, "additionalProperties": True},
        {"type": "object"},
        {"const": OPEN},
        {"allOf": [OPEN, OTHER]},
        {**OPEN, "anyOf": [OTHER, {"properties": {"c": {}}}]},
        {"items": {**OPEN, "$ref": "#/$defs/x"}, "$defs": {"x": OTHER}},
        {**OPEN, "required": ["b"]},
        {**OPEN, "minProperties": 2},
        {**OPEN, "patternProperties": {"^b": {}}},
        {"properties": 5},
        {**OPEN, "required": 5},
        {**OPEN, "required": [[]]},
    ],
)
def test_others_stay_open(schema: Any) -> None:
    """Their objects might not be valid otherwise."""
    assert closed(schema) == schema
