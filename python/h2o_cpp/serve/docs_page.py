"""The page /docs: a readable form of the OpenAPI document, without external resources."""

from __future__ import annotations

from html import escape
from typing import Any

_POLICY = "default-src 'none'; style-src 'self'; img-src data:"
_HEAD = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>h2o.cpp: endpoints</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="static/page.css">
</head>
<body>
<header>
<h1>Endpoints</h1>
<p class="hint">OpenAI's, with fields of our own. Also as an
<a href="openapi.json">OpenAPI document</a>; <a href="./">the page</a> uses them.</p>
</header>
<main class="docs">
"""


def docs_page(document: dict[str, Any]) -> str:
    """The HTML page for an OpenAPI document."""
    schemas = document["components"]["schemas"]
    sections = [
        _section(method, path, operation, schemas)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return _HEAD + "".join(sections) + "</main>\n</body>\n</html>\n"


def _section(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    description = operation.get("description") or operation["summary"]
    parts = [
        f"<h2><code>{method.upper()} {escape(path)}</code></h2>\n<p>{escape(description)}</p>\n"
    ]
    if "requestBody" in operation:
        first = _name(operation["requestBody"]["content"]["application/json"]["schema"])
        seen = [first]
        for name in seen:  # grows as fields refer to other schemas
            title = "" if name == first else f"<h3>{escape(name)}</h3>\n"
            parts.append(title + _table(schemas[name], seen))
    return f'<section class="panel">\n{"".join(parts)}</section>\n'


def _table(schema: dict[str, Any], seen: list[str]) -> str:
    rows = []
    for name, field in schema["properties"].items():
        required = " (required)" if name in schema.get("required", ()) else ""
        cells = (f"<code>{escape(name)}</code>{required}", escape(_type(field, seen)))
        description = escape(field.get("description", ""))
        rows.append(f"<tr><td>{cells[0]}</td><td>{cells[1]}</td><td>{description}</td></tr>\n")
    return f"<table>\n{''.join(rows)}</table>\n"


def _type(field: dict[str, Any], seen: list[str]) -> str:
    """A field's type in words; names of referenced schemas are appended to `seen`."""
    if "$ref" in field:
        name = _name(field)
        if name not in seen:
            seen.append(name)
        return name
    if union := field.get("anyOf") or field.get("oneOf"):
        found = [_type(one, seen) for one in union if one.get("type") != "null"]
        return " or ".join(found)
    if "enum" in field or "const" in field:
        return " or ".join(repr(value) for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        if field.get("maxItems") == 0:
            return "[]"
        return f"list of {_type(field['items'], seen)}"
    bounds = [
        f"{sign} {field[key]}"
        for key, sign in (
            *(("minimum", "≥"), ("exclusiveMinimum", ">")),
            *(("maximum", "≤"), ("exclusiveMaximum", "<")),
        )
        if key in field
    ]
    return " ".join([field.get("type", "anything"), ", ".join(bounds)]).strip()


def _name(reference: dict[str, Any]) -> str:
    name: str = reference["$ref"].rpartition("/")[2]
    return name
