"""The assistant's final message, which a prompt may continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from h2o_cpp.model.arguments import short

_REASONING = ("reasoning_content", "reasoning", "thinking")  # names in chat templates


def text_to_continue(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the final message; "": the message has no effect.

    Raises ValueError for a message that cannot be continued.
    """
    *before, last = messages
    text = last.get("content")
    if last["role"] != "assistant":
        problem = f"its role is {last['role']!r}, expected 'assistant'"
    elif not before:
        problem = "there is no message before it"
    elif before[-1]["role"] == "assistant":
        problem = "the message before it is also the assistant's"
    elif last.get("tool_calls"):
        problem = "it has tool calls"
    elif not isinstance(text, str):
        problem = f"its content is {short(text)}, expected text"
    elif not text and any(last.get(name) for name in _REASONING):
        problem = "it has reasoning but no text"
    else:
        return text
    raise ValueError(f"messages[{len(before)}] cannot be continued: {problem}")
