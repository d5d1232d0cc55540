"""Qwen3-Coder: <function=name><parameter=key>value</parameter></function> in <tool_call>."""

from __future__ import annotations

from typing import Any

from h2o_cpp.reply.calls import Tools, dumps, loads
from h2o_cpp.reply.scanner import Scanner, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_VALUE_END, _FUNCTION_END = "</parameter>", "</function>"
MARKERS = (_BEGIN, _END)


def parse(s: Scanner, tools: Tools) -> Steps[None]:
    """Content, with calls in it. The first <tool_call> is sometimes left out."""
    while True:
        _, marker = yield from s.until([_BEGIN, _FUNCTION])
        if marker is None:
            return
        text = marker
        if marker == _BEGIN:
            text += yield from s.spaces()
            if not (yield from s.starts(_FUNCTION)):
                s.not_a_call(text)
                continue
            text += _FUNCTION
        inside, end = yield from s.until([_FUNCTION_END], None)
        call = _read(inside) if end else None
        if call is None or not tools.any:
            s.not_a_call(text + inside + (end or ""))
            continue
        s.call(*call)
        yield from s.spaces()
        if (yield from s.starts(_END)):
            yield from s.spaces()


def _read(inside: str) -> tuple[str, str] | None:
    name, begin, rest = inside.partition(">")
    name = name.strip()
    if not begin or not name:
        return None
    arguments: dict[str, Any] = {}
    for part in rest.split(_PARAMETER)[1:]:
        key, _, value = part.partition(">")
        value = value.rpartition(_VALUE_END)[0] if _VALUE_END in value else value
        arguments[key.strip()] = _value(value.removeprefix("\n").removesuffix("\n"))
    return name, dumps(arguments)


def _value(text: str) -> Any:
    """JSON where it is an object, a list, a number or a constant; else it is text."""
    value = loads(text)
    return text if isinstance(value, str) or (value is None and text.strip() != "null") else value
