"""About a hundred schemas of the kinds in JSONSchemaBench, written for this project."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "maxLength": 40}
_FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri")
_PATTERNS = (
    "^[0-9]{5}(-[0-9]{4})?$",
    "^[A-Z]{2}[0-9]{2}( ?[0-9A-Z]{4}){3,7}$",
    "^#([0-9a-f]{3}|[0-9a-f]{6})$",
    "^v?[0-9]+\\.[0-9]+\\.[0-9]+(-[a-z0-9.]+)?$",
    "^[a-z][a-z0-9-]{0,62}$",
    "^\\+[1-9][0-9]{6,14}$",
    "^[^@ ]{1,30}@[a-z]{2,20}\\.[a-z]{2,5}$",
    "^(/[a-z0-9_]{1,12}){1,6}$",
    "[0-9]{4}",
    "^(GET|PUT|POST|DELETE) /[a-z/]{0,30}$",
)


def record(
    properties: Schema, *, optional: int = 0, closed: bool = True, defs: Schema | None = None
) -> Schema:
    """An object whose last properties are optional."""
    required = list(properties)[: len(properties) - optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": not closed,
        **({"$defs": defs} if defs else {}),
    }


def _scalars() -> Iterator[Schema]:
    yield {"type": "integer"}
    yield {"type": "integer", "minimum": -5, "maximum": 1200}
    yield {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    yield {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500}
    yield {"type": "string", "minLength": 3, "maxLength": 80}
    yield {"type": ["string", "null"], "maxLength": 20}
    yield {"const": {"version": 2, "tags": ["a", "b"]}}
    yield {"type": "boolean"}


def _flat() -> Iterator[Schema]:
    kinds: list[Schema] = [_TEXT, {"type": "integer"}, {"type": "boolean"}, {"type": "number"}]
    for n in (1, 4, 8, 16, 32, 64):
        yield record({f"field_{i}": kinds[i % 4] for i in range(n)})


def _optional() -> Iterator[Schema]:
    for n, optional in ((4, 2), (8, 4), (8, 8), (16, 12), (30, 30), (60, 50)):
        yield record({f"option_{i}": _TEXT for i in range(n)}, optional=optional)


def _nested() -> Iterator[Schema]:
    for depth in (2, 4, 6, 8, 12):
        for width in (1, 3):
            schema = record({"value": _TEXT})
            for level in range(depth):
                schema = record(
                    {f"level_{level}": schema, **{f"n{i}": _TEXT for i in range(width)}}
                )
            yield schema


def _enums() -> Iterator[Schema]:
    for n in (2, 10, 50, 200, 800):
        yield {"enum": [f"value_{i}_{i * 7919 % 1000}" for i in range(n)]}
    yield {"enum": [1, 2.5, "three", None, True, [4], {"five": 5}]}
    yield record({f"e{i}": {"enum": ["low", "middle", "high"]} for i in range(12)})


def _any_of() -> Iterator[Schema]:
    for n in (2, 4, 8, 16, 40):
        yield {"anyOf": [record({"kind": {"const": f"k{i}"}, f"p{i}": _TEXT}) for i in range(n)]}
    yield {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "integer"}, {"type": "null"}]}
    yield {"oneOf": [record({"a": _TEXT}), record({"b": {"type": "integer"}})]}
    yield {"anyOf": [{"type": "array", "items": {"type": "integer"}, "maxItems": 9}, _TEXT]}
    yield {"allOf": [record({"a": _TEXT}, closed=False), record({"b": _TEXT}, closed=False)]}
    point = record({"x": {"type": "number"}, "y": {"type": "number"}})
    yield {
        "anyOf": [point, {"anyOf": [record({"points": {"type": "array", "items": point}}), _TEXT]}]
    }


def _patterns() -> Iterator[Schema]:
    for pattern in _PATTERNS:
        yield {"type": "string", "pattern": pattern, "maxLength": 60}
    yield record({f"p{i}": {"type": "string", "pattern": p} for i, p in enumerate(_PATTERNS[:8])})


def _arrays() -> Iterator[Schema]:
    for least, most in ((0, 3), (2, 2), (1, 10), (5, 50), (0, 200)):
        yield {"type": "array", "items": _TEXT, "minItems": least, "maxItems": most}
    pair = [{"type": "string", "maxLength": 9}, {"type": "integer"}]
    yield {"type": "array", "prefixItems": pair, "items": False, "minItems": 2}
    yield {"type": "array", "items": {"type": "array", "items": {"type": "number"}, "maxItems": 4}}
    yield {
        "type": "array",
        "items": record({"name": _TEXT, "n": {"type": "integer"}}),
        "maxItems": 8,
    }
    yield {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "maxItems": 3}


def _references() -> Iterator[Schema]:
    node = record(
        {"label": _TEXT, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}
    )
    yield {"$ref": "#/$defs/node", "$defs": {"node": node}}
    chain: Schema = {"next": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}}
    yield {"$ref": "#/$defs/link", "$defs": {"link": record({"value": _TEXT, **chain})}}
    for n in (2, 8, 32):
        defs = {f"d{i}": record({f"v{i}": _TEXT}) for i in range(n)}
        yield record({name: {"$ref": f"#/$defs/{name}"} for name in defs}, defs=defs)
    both: Schema = {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/sum"}]}
    terms: Schema = {"type": "array", "items": {"$ref": "#/$defs/term"}, "maxItems": 3}
    defs = {"sum": record({"sum": terms}), "term": both}
    yield {"$ref": "#/$defs/term", "$defs": defs}
    yield {"definitions": {"a": _TEXT}, "type": "array", "items": {"$ref": "#/definitions/a"}}


def _open_objects() -> Iterator[Schema]:
    yield {"type": "object"}
    yield {"type": "object", "additionalProperties": {"type": "integer"}}
    yield {
        "type": "object",
        "additionalProperties": _TEXT,
        "properties": {"id": {"type": "integer"}},
    }
    yield record({"id": {"type": "integer"}}, closed=False)
    yield {"type": "object", "patternProperties": {"^x-": _TEXT}, "additionalProperties": False}
    yield {"type": "object", "additionalProperties": {"type": "array", "items": _TEXT}}
    yield {}


def _formats() -> Iterator[Schema]:
    for name in _FORMATS:
        yield {"type": "string", "format": name}
    yield record({name: {"type": "string", "format": name} for name in _FORMATS})


def _documents() -> Iterator[Schema]:
    """Schemas of tools and configuration files."""
    address = record(
        {
            "street": _TEXT,
            "city": _TEXT,
            "zip": {"type": "string", "pattern": _PATTERNS[0]},
            "country": {"enum": ["DE", "FR", "IT", "ES", "US", "JP"]},
        }
    )
    line = record({"item": _TEXT, "count": {"type": "integer", "minimum": 1, "maximum": 99}})
    order = record(
        {
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1},
            "billing": {"$ref": "#/$defs/address"},
            "delivery": {"anyOf": [{"$ref": "#/$defs/address"}, {"type": "null"}]},
            "at": {"type": "string", "format": "date-time"},
        },
        defs={"address": address, "line": line},
    )
    yield order
    yield {"type": "array", "items": address, "maxItems": 5}
    step = record(
        {
            "name": _TEXT,
            "run": {"type": "string", "maxLength": 200},
            "env": {"type": "object", "additionalProperties": _TEXT},
            "timeout": {"type": "integer", "minimum": 1, "maximum": 360},
        },
        optional=3,
    )
    job = record(
        {"on": {"enum": ["linux", "mac", "windows"]}, "steps": {"type": "array", "items": step}}
    )
    jobs: Schema = {"type": "object", "additionalProperties": {"$ref": "#/$defs/job"}}
    yield record({"name": _TEXT, "jobs": jobs}, defs={"job": job})
    geometry = [
        record({"type": {"const": "Point"}, "coordinates": {"$ref": "#/$defs/position"}}),
        record(
            {
                "type": {"const": "LineString"},
                "coordinates": {"type": "array", "items": {"$ref": "#/$defs/position"}},
            }
        ),
    ]
    position: Schema = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3}
    yield {"anyOf": geometry, "$defs": {"position": position}}
    yield record(
        {
            f"section_{i}": record({f"key_{j}": _TEXT for j in range(10)}, optional=5)
            for i in range(10)
        },
        optional=8,
    )


KINDS = {
    "numbers, strings, constants": _scalars,
    "records, 1 to 64 fields": _flat,
    "optional fields": _optional,
    "nested objects": _nested,
    "enums": _enums,
    "anyOf, oneOf, allOf": _any_of,
    "patterns": _patterns,
    "arrays with limits": _arrays,
    "$ref, recursive too": _references,
    "open objects": _open_objects,
    "formats": _formats,
    "documents": _documents,
}


def cases() -> dict[str, list[Schema]]:
    """Schemas by kind."""
    return {kind: [*make()] for kind, make in KINDS.items()}
