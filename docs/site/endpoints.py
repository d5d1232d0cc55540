"""The server as a page: every endpoint and field, as its OpenAPI has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from h2o_cpp import BUNDLED_MODEL, Generator
from h2o_cpp.serve.app import create_app

Schema = Mapping[str, Any]


def server_reference() -> str:
    """Markdown of the endpoints, and then of every object that is sent or received."""
    with Generator(BUNDLED_MODEL, threads=1) as generator:
        api = create_app(generator, name="model").openapi()
    schemas = api["components"]["schemas"]
    parts = [*_endpoints(api["paths"])]
    for name in _in_order(api["paths"], schemas):
        parts += _object(name, schemas[name])
    return "\n\n".join(parts)


def _in_order(value: Any, schemas: Schema, found: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Names of objects, each before those that it refers to."""
    if isinstance(value, dict):
        name = str(value.get("$ref", "")).rpartition("/")[2]
        if name and name not in found:
            found = _in_order(schemas[name], schemas, (*found, name))
        value = [*value.values()]
    if isinstance(value, list):
        for one in value:
            found = _in_order(one, schemas, found)
    return found


def _endpoints(paths: Schema) -> Iterator[str]:
    yield "## Endpoints"
    rows = ["| | | sends | gets |", "|---|---|---|---|"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            sent = operation.get("requestBody", {}).get("content", {})
            got = operation["responses"]["200"].get("content", {})
            rows.append(
                f"| `{method.upper()} {path}` | {_cell(operation.get('description', ''))} "
                f"| {_contents(sent)} | {_contents(got)} |"
            )
    yield "\n".join(rows)


def _contents(contents: Schema) -> str:
    types = (_type(content["schema"]) for content in contents.values() if "schema" in content)
    return " or ".join(dict.fromkeys(type for type in types if type != "any"))


def _object(name: str, schema: Schema) -> Iterator[str]:
    yield f"## {name}"
    yield schema.get("description", "")
    required = schema.get("required", ())
    rows = ["| field | type | default | |", "|---|---|---|---|"]
    for field, value in schema["properties"].items():
        default = "required" if field in required else _default(value)
        rows.append(
            f"| `{field}` | {_type(value)} | {default} | {_cell(value.get('description', ''))} |"
        )
    yield "\n".join(rows)


def _default(value: Schema) -> str:
    given = value.get("default")
    return "" if given is None else f"`{str(given).lower() if isinstance(given, bool) else given}`"


def _type(schema: Schema) -> str:
    """A type and its limits, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema or "oneOf" in schema:
        types = (_type(one) for one in schema.get("anyOf", schema.get("oneOf", ())))
        return " or ".join(dict.fromkeys(type for type in types if type != "null"))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    match schema.get("type"):
        case "array":
            type = f"list of {_type(schema.get('items', {}))}"
        case "object":
            values = schema.get("additionalProperties")
            type = f"object of {_type(values)}" if isinstance(values, dict) else "object"
        case None:
            type = "any"
        case str(name):
            type = name
        case names:
            type = " or ".join(names)
    return type + _limits(schema)


_LIMITS = {
    "minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}",
    "exclusiveMaximum": "below {}", "minLength": "at least {} characters",
    "maxLength": "at most {} characters", "minItems": "at least {}", "maxItems": "at most {}",
    "maxProperties": "at most {} entries",
}  # fmt: skip


def _limits(schema: Schema) -> str:
    said = [words.format(_number(schema[key])) for key, words in _LIMITS.items() if key in schema]
    return f" ({', '.join(said)})" if said else ""


def _number(value: float) -> str:
    whole = int(value)
    large = whole == value and whole > 2**20 and whole & (whole - 1) == 0
    return f"2^{whole.bit_length() - 1}" if large else f"{value:g}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
