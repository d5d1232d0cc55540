"""Incremental JSON: values are passed on as they arrive, as far as they are valid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from h2o_cpp.reply.scanner import Scanner, Steps

Out = Callable[[str], object]  # receives text in order

_MAX_NESTED = 64
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SCALAR_CHARACTERS = re.compile(r"[\w.+-]*", re.ASCII)
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)


def read_value(s: Scanner, out: Out, nested: int = _MAX_NESTED) -> Steps[bool]:
    """Read a value; False if it is invalid. In strings, line breaks are escaped, and \\' becomes an
    apostrophe.
    """
    begin = yield from s.peek()
    if begin == '"':
        return (yield from read_string(s, out))
    if begin == "[" and nested > 0:
        return (yield from _read_list(s, out, "]", lambda: read_value(s, out, nested - 1)))
    if begin == "{" and nested > 0:
        return (yield from read_object(s, out, lambda _: read_value(s, out, nested - 1)))
    scalar = yield from s.run(_SCALAR_CHARACTERS)
    if not _SCALAR.fullmatch(scalar):
        return False
    out(scalar)
    return True


def read_object(s: Scanner, out: Out, member: Callable[[str], Steps[bool]]) -> Steps[bool]:
    """Read an object from its brace on; member(key) reads each value."""

    def one() -> Steps[bool]:
        spelled: list[str] = []

        def both(text: str) -> None:
            spelled.append(text)
            out(text)

        if (yield from s.peek()) != '"' or not (yield from read_string(s, both)):
            return False
        out((yield from s.run(_SPACE)))
        if not (yield from s.starts(":")):
            return False
        out(":")
        out((yield from s.run(_SPACE)))
        return (yield from member(json.loads("".join(spelled))))

    return (yield from _read_list(s, out, "}", one))


def _read_list(s: Scanner, out: Out, end: str, one: Callable[[], Steps[bool]]) -> Steps[bool]:
    out(s.take(1))
    out((yield from s.run(_SPACE)))
    ended = yield from s.starts(end)
    while not ended:
        if not (yield from one()):
            return False
        out((yield from s.run(_SPACE)))
        ended = yield from s.starts(end)
        if not ended:
            if not (yield from s.starts(",")):
                return False
            out(",")
            out((yield from s.run(_SPACE)))
    out(end)
    return True


def read_string(s: Scanner, out: Out) -> Steps[bool]:
    """Read a string from its quote on."""
    out(s.take(1))
    while True:
        yield from s.run(_PLAIN, out)
        match (yield from s.peek()):
            case "":
                return False
            case '"':
                out(s.take(1))
                return True
            case "\\":
                n = 2
                if (yield from s.has(n)) and s.rest[1] == "u":
                    n = 6
                if not (yield from s.has(n)):
                    return False
                if s.rest[1] == "'":  # as in Python; models write it
                    s.take(1)
                elif _ESCAPE.match(s.rest):
                    out(s.take(n))
                else:
                    return False
            case control:
                out(json.dumps(control)[1:-1])
                s.take(1)
