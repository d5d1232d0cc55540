"""Grammars of replies that must call a tool, or whose content has an output format."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from h2o_cpp.reply.formats import ReplyFormat
from h2o_cpp.reply.json_schema import without_defaults
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
    """A grammar of replies that are optional reasoning followed by calls of these tools.

    tools: schemas of the arguments by name; None: no arguments. thinking: the reply begins inside
    reasoning. The rest as for Rules.

    Raises ValueError for tools that cannot be called.
    """
    if format.grammar is None:
        raise ValueError(f"tool calls are not supported in the format {format.name}")
    if not tools:
        raise ValueError("there is no tool to call")
    rules = Rules(
        _objects(tools), template=template, token_of=token_of, ends=ends, parallel=parallel
    )
    calls = format.grammar(rules)
    if format.think is None:
        return rules.grammar(calls)
    begin, end = format.think
    thought = _thought(rules, end)
    if not thinking:
        thought = f"({rules.marker(begin)} {thought})?"
    return rules.grammar(f"{thought} {calls}")


def form_grammar(
    format: ReplyFormat,
    tools: Mapping[str, Any],
    *,
    template: str,
    token_of: Callable[[str], int | None],
    ends: Collection[int],
    parallel: bool = True,
    thinking: bool = False,
) -> str | None:
    """A grammar of replies that are content, which is @form, or calls of these tools; reasoning
    and headers may come first. None: only content.

    Arguments and errors as for call_grammar, but there may be no tools.
    """
    rules = Rules(
        _objects(tools), template=template, token_of=token_of, ends=ends, parallel=parallel
    )
    reply = "@form"
    if format.before_form is not None:
        reply = f"{format.before_form(rules)} @form"
    if tools and format.grammar is not None:
        reply = f"({reply} | {format.grammar(rules)})"
    if thinking and format.think is not None:
        reply = f"{_thought(rules, format.think[1])} {reply}"
    return None if reply == "@form" else rules.grammar(reply)


def _thought(rules: Rules, end: str) -> str:
    lines = rules.terminal(r"/\n{1,2}/")
    return f"{rules.up_to(end)} {lines}?"


def _objects(tools: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: _object(name, schema) for name, schema in tools.items()}


def _object(name: str, schema: Any) -> Mapping[str, Any]:
    """The schema of a tool's arguments, which are always an object.

    Without further keywords, additional properties are forbidden: small models would invent them
    without end.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"tool name {name!r} is invalid, expected letters, digits, '_', '.' and '-'"
        )
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ValueError(f"the parameters of {name} must have type object")
    properties, required = schema.get("properties"), schema.get("required", [])
    if (
        schema.keys() <= _PLAIN
        and isinstance(properties, Mapping)
        and isinstance(required, list)
        and all(key in [*properties] for key in required)
    ):
        schema = {**schema, "additionalProperties": False}
    return {"type": "object", **without_defaults(schema)}
