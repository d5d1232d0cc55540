"""Qwen3-Coder: <function=name><parameter=key>value</parameter></function> in <tool_call>."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from h2o_cpp.reply.calls import Tools, dumps
from h2o_cpp.reply.parameters import Parameter, parameter_of, parsed, rules_of
from h2o_cpp.reply.rules import Rules
from h2o_cpp.reply.scanner import Scanner, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_VALUE_END, _FUNCTION_END = "</parameter>", "</function>"
_VALUE_ENDS = (_VALUE_END, _PARAMETER, _FUNCTION_END)
_NEVER = (_PARAMETER, _FUNCTION_END)  # in a value that is text
MARKERS = (_BEGIN, _END)


def parse(s: Scanner, tools: Tools) -> Steps[None]:
    """Parse content and calls. The first <tool_call> may be missing."""
    while (marker := (yield from s.until([_BEGIN, _FUNCTION]))) is not None:
        s.keep(marker)
        begins = marker == _FUNCTION
        if not begins:
            yield from s.spaces()
            begins = yield from s.starts(_FUNCTION)
        if not begins or not tools.any or not (yield from _call(s, tools)):
            s.not_a_call()
            continue
        s.end_call()
        yield from s.space_after_call()
        if (yield from s.skip(_END)):
            yield from s.space_after_call()


def _call(s: Scanner, tools: Tools) -> Steps[bool]:
    """Read a call from the name up to </function>."""
    given: list[str] = []
    if (yield from s.up_to([">", _FUNCTION_END], given.append)) != ">":
        return False
    name = "".join(given).strip()
    if not name:
        return False
    s.begin_call(name)
    s.add_arguments("{")
    schema = tools.schema(name)
    between = ""
    marker = yield from s.up_to([_PARAMETER, _FUNCTION_END], lambda _: None)
    while marker == _PARAMETER:
        given = []
        if (yield from s.up_to([">", _PARAMETER, _FUNCTION_END], given.append)) != ">":
            return False
        key = "".join(given).strip()
        s.add_arguments(f"{between}{dumps(key)}: ")
        between = ", "
        marker = yield from _argument(s, parameter_of(schema, key))
    if marker is None:  # cut: the arguments must not look complete
        return False
    s.add_arguments("}")
    return True


def _argument(s: Scanner, kind: Parameter | None) -> Steps[str | None]:
    """Read a value and emit it, text as it arrives; return the marker after it. Of several ends the
    last one counts. A line break at each end of the value is not part of it.
    """
    is_text = kind is not None and kind.is_text
    value: list[str] = []
    after: list[str] | None = None  # an end marker, and text after it
    begun = False

    def emit() -> None:
        nonlocal begun
        text = "".join(value)
        if text and not begun:
            begun, text = True, text.removeprefix("\n")
        value[:] = ["\n"] if text.endswith("\n") else []
        s.add_arguments(dumps(text.removesuffix("\n"))[1:-1])

    def out(text: str) -> None:
        if after is not None:
            after.append(text)
            return
        value.append(text)
        if is_text:
            emit()

    if is_text:
        s.add_arguments('"')
    marker = yield from s.up_to(_VALUE_ENDS, out)
    while marker == _VALUE_END:
        if after is not None:
            found, after = [_VALUE_END, *after], None
            out("".join(found))
        after = []
        marker = yield from s.up_to(_VALUE_ENDS, out)
    if marker is None:
        return None
    if is_text:
        s.add_arguments('"')
    else:
        text = "".join(value).removeprefix("\n").removesuffix("\n")
        s.add_arguments(dumps(parsed(text, kind)))
    return marker


def grammar(r: Rules) -> str:
    """A grammar of calls.

    It also allows JSON strings with </parameter>, <parameter= or </function>, which parse() reads
    differently.
    """
    line = "\n"
    value_end = f"\n{_VALUE_END}\n"

    def parameter(key: str, kind: Parameter) -> str:
        return f"{r.text(f'{_PARAMETER}{key}>' + line)} {kind.rule(r, value_end, _NEVER)}"

    def call(name: str, schema: Mapping[str, Any]) -> str:
        begin, end = r.text(f"\n{_FUNCTION}{name}>\n"), r.text(f"{_FUNCTION_END}\n")
        parameters = rules_of(r, schema, parameter)
        return f"{r.marker(_BEGIN)} {begin} {parameters} {end} {r.marker(_END)}"

    return r.calls(call, between=r.text("\n"))
