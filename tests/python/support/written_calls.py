"""Replies with tool calls, in the format of each model family, whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from h2o_cpp.reply import FORMATS, ReplyFormat

FORMAT_NAMES = ["hermes", "qwen3-coder", "llama3", "mistral", "mistral-args", "harmony"]

Call = tuple[str, dict[str, Any]]  # a tool's name, and its arguments


def format_of(name: str) -> ReplyFormat:
    """The format of one of FORMAT_NAMES."""
    return FORMATS[name.removesuffix("-args")]


def split(text: str, cuts: Sequence[int]) -> list[str]:
    """The pieces of a text that is cut at these positions, modulo its length."""
    ends = sorted({position % (len(text) + 1) for position in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


def written(format: str, calls: Sequence[Call], *, indent: int | None = None) -> str:
    """A reply with these calls; `indent` is the JSON's."""

    def dumps(value: Any) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=False)

    match format:
        case "hermes":
            return "\n".join(
                f"<tool_call>\n{dumps({'name': name, 'arguments': given})}\n</tool_call>"
                for name, given in calls
            )
        case "qwen3-coder":
            return "\n".join(f"<tool_call>\n{_function(*call)}\n</tool_call>" for call in calls)
        case "llama3":
            return "; ".join(dumps({"name": name, "parameters": given}) for name, given in calls)
        case "mistral":
            entries = [{"name": name, "arguments": given} for name, given in calls]
            return f"[TOOL_CALLS]{dumps(entries)}"
        case "mistral-args":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(given)}" for name, given in calls)
        case "harmony":
            return "<|start|>assistant".join(
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
                f"{dumps(given)}<|call|>"
                for name, given in calls
            )
    raise AssertionError(format)


def _function(name: str, given: dict[str, Any]) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
        "</parameter>\n"
        for key, value in given.items()
    )
    return f"<function={name}>\n{parameters}</function>"
