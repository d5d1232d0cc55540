"""The grammar of replies that must call a tool, in each of the formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from h2o_cpp.reply.formats import ReplyFormat
from h2o_cpp.reply.rules import Rules

_NAME = re.compile(r"[\w.-]+")
_PLAIN = {
    "$schema",
    "$defs",
    "definitions",
    "type",
    "title",
    "description",
    "properties",
    "required",
}


def call_grammar(
    format: ReplyFormat,
    tools: Mapping[str, Any],
    *,
    template: str,
    token_of: Callable[[str], int | None],
    ends: Collection[int],
    parallel: bool = True,
    thinking: bool = False,
) -> str:
    """A grammar of replies that are reasoning, perhaps, and calls of these tools.

    tools: schemas of the arguments by names; None: without any. Otherwise as for Rules;
    thinking: the reply begins inside of reasoning.

    Raises ValueError for tools that cannot be called, with the reason.
    """
    if format.grammar is None:
        raise ValueError(f"how tools are called in the format {format.name} is not known")
    if not tools:
        raise ValueError("there is no tool to call")
    schemas = {name: _object(name, schema) for name, schema in tools.items()}
    rules = Rules(schemas, template=template, token_of=token_of, ends=ends, parallel=parallel)
    calls = format.grammar(rules)
    if format.think is None:
        return rules.grammar(calls)
    begin, end = format.think
    lines = rules.terminal(r"/\n{1,2}/")
    thought = f"{rules.up_to(end)} {lines}?"
    if not thinking:
        thought = f"({rules.marker(begin)} {thought})?"
    return rules.grammar(f"{thought} {calls}")


def _object(name: str, schema: Any) -> Mapping[str, Any]:
    """The schema of a tool's arguments, which are always an object.

    Where it only lists them, there are no others: a small model would not stop to invent them.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"tool {name!r} cannot be called: its name has other than a-z, 0-9, _.-")
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ValueError(f"the parameters of {name} are not of type object")
    properties, required = schema.get("properties"), schema.get("required", [])
    if (
        schema.keys() <= _PLAIN
        and isinstance(properties, Mapping)
        and isinstance(required, list)
        and all(key in [*properties] for key in required)
    ):
        schema = {**schema, "additionalProperties": False}
    return {"type": "object", **schema}
