"""JSON schemas in forms that llguidance implements and small models can follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_VALUES = ("const", "enum", "default", "examples")  # not schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_MOST = 2**53 - 1
_MOST_MERGED = 32  # because what references have in common is written for each of them
# Keywords of objects that can become one.
_PLAIN = {
    *("type", "properties", "required", "allOf", "$ref"),
    *("title", "description", "default", "examples", "$schema", "$id", "$defs", "definitions"),
}
_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")


# Keywords with parts that must allow each other's properties.
_COMBINED = {"allOf", "if", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"}
_OTHERS = {"patternProperties", "minProperties"}  # about properties that are not named
_COMBINED_BESIDE = {"anyOf", "oneOf", "$ref"}  # if properties are beside them


def without_defaults(schema: Any) -> Any:
    """The schema without `"uniqueItems": false`."""
    return _without(schema, lambda key, value: key == "uniqueItems" and value is False)


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema in which objects with properties have no others, and integers have 16 digits at
    most, as in llama.cpp: small models would add to them without end.

    Plain objects in `allOf` become one. Unchanged if parts are combined in other ways.
    """
    root, n_merged, combined = schema, 0, False

    def merge(one: dict[str, Any]) -> dict[str, Any]:
        nonlocal n_merged
        n_merged += "allOf" in one
        return one if n_merged > _MOST_MERGED else _merged(one, root)

    def close(one: dict[str, Any]) -> dict[str, Any]:
        nonlocal combined
        properties, required = one.get("properties"), one.get("required", [])
        combined = combined or bool(one.keys() & _COMBINED)
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return _bounded(one)
        combined = combined or bool(one.keys() & _COMBINED_BESIDE)
        if one.keys() & _OTHERS or any(not _has(properties, key) for key in required):
            return one
        return {"additionalProperties": False, **one}

    found: Mapping[str, Any] = _changed(_changed(schema, merge), close)
    return root if combined else found


def _bounded(one: dict[str, Any]) -> dict[str, Any]:
    """A schema whose integers are those that all JSON parsers read exactly."""
    given = one.get("type")
    kinds = given if isinstance(given, list) else [given]
    if "integer" not in kinds or "number" in kinds or one.keys() & {"const", "enum"}:
        return one
    numbers = [one[name] for name in (*_LOWER, *_UPPER) if name in one]
    if not all(isinstance(n, int | float) and abs(n) < _MOST for n in numbers):
        return one
    lower = {} if one.keys() & {*_LOWER} else {"minimum": -_MOST}
    upper = {} if one.keys() & {*_UPPER} else {"maximum": _MOST}
    return {**one, **lower, **upper}


def _merged(one: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A schema in which the parts of allOf are one object, if all of them are plain ones."""
    parts = _parts(one, root, depth=8) if "allOf" in one else None
    properties: dict[str, Any] = {}
    for name, value in [
        item for part in parts or () for item in part.get("properties", {}).items()
    ]:
        if properties.setdefault(name, value) != value:
            return one
    if parts is None or not properties:
        return one
    required = [name for part in parts for name in part.get("required", ())]
    definitions = {key: one[key] for key in _DEFINITIONS if key in one}
    return {**definitions, "type": "object", "properties": properties, "required": required}


def _parts(one: Any, root: Mapping[str, Any], depth: int) -> list[dict[str, Any]] | None:
    """The plain objects that a schema combines by allOf and $ref; None: others are among them."""
    if not isinstance(one, dict) or depth == 0 or not one.keys() <= _PLAIN:
        return None
    kinds = {"properties": dict, "required": list, "allOf": list}
    if one.get("type", "object") != "object" or not all(
        isinstance(one[key], kind) for key, kind in kinds.items() if key in one
    ):
        return None
    found = [one]
    for part in [*one.get("allOf", ()), *([_definition(one, root)] if "$ref" in one else ())]:
        parts = _parts(part, root, depth - 1)
        if parts is None or len(found) + len(parts) > _MOST_MERGED:
            return None
        found += parts
    return found


def _definition(one: dict[str, Any], root: Mapping[str, Any]) -> Any:
    """The schema that one refers to by "#/$defs/x"; None for another kind of reference."""
    match str(one["$ref"]).split("/"):
        case ["#", kind, _] if kind in _DEFINITIONS:
            return target(root, one["$ref"])
    return None


def target(root: Any, reference: str) -> Any:
    """The schema at a JSON pointer such as "#/$defs/x" in `root`; None: there is none."""
    if not reference.startswith("#/"):
        return None
    found = root
    for name in reference[2:].split("/"):
        if not isinstance(found, Mapping):
            return None
        found = found.get(name.replace("~1", "/").replace("~0", "~"))
    return found


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
