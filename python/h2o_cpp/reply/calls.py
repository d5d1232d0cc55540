"""The common part of formats of tool calls: calls with JSON arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from h2o_cpp.reply.json_text import read_object, read_value
from h2o_cpp.reply.scanner import Scanner, Steps


class Tools:
    """The tools that a reply may call."""

    def __init__(self, names: Collection[str] | None) -> None:
        """`names`: None: any tool; empty: none; a mapping has the schemas of their arguments."""
        self._names = None if names is None else frozenset(names)
        self._schemas: Mapping[str, Any] = names if isinstance(names, Mapping) else {}

    def schema(self, name: str) -> Any:
        """The schema of a tool's arguments; None if unknown."""
        return self._schemas.get(name)

    def has(self, name: str) -> bool:
        """Whether a tool exists, for formats in which a call could be something else."""
        return self._names is None or name in self._names

    @property
    def any(self) -> bool:
        """Whether there are tools, for formats that mark calls.

        A model may invent a name, which the caller must check.
        """
        return self._names is None or bool(self._names)


def loads(text: str) -> Any:
    """JSON, also with line breaks in strings; None if it is invalid."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(name)


def dumps(value: Any) -> str:
    """JSON on one line, valid Unicode."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # an unpaired surrogate
        text = json.dumps(value)
    return text


def read_arguments(s: Scanner, name: str) -> Steps[bool]:
    """Read a JSON object, the arguments of a call, and emit it as it arrives. False if it is
    invalid. Does not end the call.
    """
    if (yield from s.peek()) != "{":
        return False
    s.begin_call(name)
    return (yield from read_value(s, s.add_arguments))


def read_call(s: Scanner, known: Callable[[str], bool] | None = None) -> Steps[bool]:
    """Read {"name": ..., "arguments": {...}} and emit the call as it arrives. False if it is
    invalid or the tool is unknown. Does not end the call.
    """
    name = early = None
    begun = False

    def member(key: str) -> Steps[bool]:
        nonlocal name, early, begun
        text: list[str] = []
        if key == "name" and name is None:
            if not (yield from read_value(s, text.append)):
                return False
            name = _name("".join(text))
            return name is not None and (known is None or known(name))
        if key not in ("arguments", "parameters"):
            return (yield from read_value(s, text.append))
        if begun or early is not None:
            return False
        if name is not None and (yield from s.peek()) == "{":
            begun = True
            return (yield from read_arguments(s, name))
        if not (yield from read_value(s, text.append)):
            return False
        early = _object("".join(text))
        return early is not None

    if (yield from s.peek()) != "{" or not (yield from read_object(s, lambda _: None, member)):
        return False
    if name is None:
        return False
    if not begun:
        s.begin_call(name)
        s.add_arguments(early or "{}")
    return True


def _name(text: str) -> str | None:
    name = loads(text)
    if not isinstance(name, str) or not name:
        return None
    try:
        name.encode()
    except UnicodeEncodeError:
        return None
    return name


def _object(text: str) -> str | None:
    """Arguments that precede the name, or are null or a JSON string."""
    if text in ("null", '""'):
        return "{}"
    value = loads(text)
    if isinstance(value, str):
        value = loads(value)
    return dumps(value) if isinstance(value, dict) else None
