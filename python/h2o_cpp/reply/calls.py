"""What the formats of tool calls have in common: a call is JSON, valid or not a call."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from h2o_cpp.reply.json_text import read_object, read_value
from h2o_cpp.reply.scanner import Scanner, Steps


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


def read_arguments(s: Scanner, name: str) -> Steps[bool]:
    """Take a JSON object, which are the arguments of a call, and say them as they come; False
    where it stops being one. The call is not ended."""
    if (yield from s.peek()) != "{":
        return False
    s.begin_call(name)
    return (yield from read_value(s, s.add_arguments))


def read_call(s: Scanner, known: Callable[[str], bool] | None = None) -> Steps[bool]:
    """Take {"name": ..., "arguments": {...}} and say the call as it comes; False where it stops
    being one, or its tool is not known. The call is not ended."""
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
    """Arguments that came before the name, or are JSON as text."""
    value = loads(text)
    if isinstance(value, str):
        value = loads(value)
    return dumps(value) if isinstance(value, dict) else None
