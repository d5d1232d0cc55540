"""Schemas whose objects have only the properties that they name."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_cpp.reply.json_schema import closed

OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED = {**OPEN, "additionalProperties": False}
UPPER = {"maximum": 2**53 - 1}
BOUNDS = {"minimum": 1 - 2**53, **UPPER}
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
        ({"type": "integer"}, {"type": "integer", **BOUNDS}),
        ({"type": "integer", "minimum": 5}, {"type": "integer", "minimum": 5, **UPPER}),
        ({"type": ["null", "integer"]}, {"type": ["null", "integer"], **BOUNDS}),
        ({"allOf": [OPEN]}, {**CLOSED, "required": []}),
        (
            {"allOf": [{"$ref": "#/$defs/x"}, {**OTHER, "required": ["b"]}], "$defs": {"x": OPEN}},
            {
                **CLOSED,
                **{"properties": {**OPEN["properties"], **OTHER["properties"]}},
                **{"required": ["b"], "$defs": {"x": CLOSED}},
            },
        ),
        (
            {"properties": {"properties": OPEN}},
            {"properties": {"properties": CLOSED}, "additionalProperties": False},
        ),
    ],
)
def test_objects_with_properties_are_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


def test_references_do_not_multiply() -> None:
    """Neither the time nor the size of what is merged."""
    large = {"properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    many = {f"q{i}": {"allOf": [{"$ref": "#/$defs/large"}]} for i in range(1000)}
    schema = {"properties": many, "$defs": {"large": large}}
    assert closed(schema) == schema
    layers: dict[str, Any] = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 100} for i in range(7)
    }
    schema = {"allOf": [{"$ref": "#/$defs/d0"}], "$defs": {**layers, "d7": OPEN}}
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {**OPEN, "additionalProperties": True},
        {"type": "object"},
        {"const": OPEN},
        {"allOf": [OPEN, {**OTHER, "additionalProperties": True}]},
        {"allOf": [OPEN, {"properties": {"a": {"minLength": 2}}}]},
        {"allOf": [OPEN, {"anyOf": [OTHER]}]},
        {"allOf": [{"$ref": "#"}, OPEN]},
        {"allOf": [{"$ref": "other.json"}, OPEN]},
        {"allOf": [{"minimum": 5}, {"maximum": 6}]},
        {"allOf": [5]},
        {"not": {"type": "integer"}},
        {"enum": [10**20], "type": "integer"},
        {"type": "integer", "minimum": 10**20},
        {"type": ["integer", "number"]},
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
