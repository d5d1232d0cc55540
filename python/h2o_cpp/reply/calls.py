"""What the formats of tool calls have in common: a call is JSON, valid or not a call."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any


class Tools:
    """Which tools a reply may call."""

    def __init__(self, names: Collection[str] | None) -> None:
        """`names`: None is any; an empty list is none; a mapping has their schemas, too."""
        self._names = None if names is None else frozenset(names)
        self._schemas: Mapping[str, Any] = names if isinstance(names, Mapping) else {}

    def schema(self, name: str) -> Any:
        """Of the arguments; None where it is not known."""
        return self._schemas.get(name)

    def has(self, name: str) -> bool:
        """Whether there is this one, for formats in which a call could be something else."""
        return self._names is None or name in self._names

    @property
    def any(self) -> bool:
        """Whether there are any, for formats that mark calls: a model may make up a name, and to
        say so is the caller's business."""
        return self._names is None or bool(self._names)


def loads(text: str) -> Any:
    """JSON, in which strings may have line breaks; None if it is invalid."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(name)


def dumps(value: Any) -> str:
    """JSON on one line, which is valid Unicode."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(value)
    return text


def read_call(value: Any) -> tuple[str, str] | None:
    """Name and arguments of {"name": ..., "arguments": {...}}; None if it is something else."""
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON as text
        arguments = loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        name.encode()
    except UnicodeEncodeError:
        return None
    return name, dumps(arguments)
