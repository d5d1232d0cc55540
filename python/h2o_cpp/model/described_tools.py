"""Tools in the text of a conversation, for chat templates without a known format of calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from h2o_cpp.arguments import short
from h2o_cpp.model.chat_turn import tool_schemas
from h2o_cpp.model.template_messages import Message
from h2o_cpp.reply.calls import dumps

# The words of Qwen 2.5's template.
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_described_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """The conversation with its tools in the system's message, and calls and results as text.

    Raises as tool_schemas() does.
    """
    tool_schemas(tools)
    told = [*_as_text(messages)]
    if not tools:
        return told
    text = _TOOLS.format(tools="\n".join(map(dumps, tools)))
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": _joined(told[0].get("content"), text)}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _as_text(messages: Sequence[Message]) -> Iterator[Message]:
    for is_result, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            results = (f"<tool_response>\n{_text(one)}\n</tool_response>" for one in group)
            yield {"role": "user", "content": "\n".join(results)}
            continue
        for message in group:
            calls = message.get("tool_calls")
            if not calls:
                yield message
                continue
            text = "\n".join(f"<tool_call>\n{_call(call)}\n</tool_call>" for call in calls)
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            yield {**rest, "content": _joined(message.get("content"), text)}


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else dumps(content)


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    written = arguments if isinstance(arguments, str) else dumps(arguments)
    return f'{{"name": {dumps(function.get("name"))}, "arguments": {written}}}'


def _joined(content: Any, text: str) -> Any:
    """The content of a message, with text after it."""
    if not content:
        return text
    if isinstance(content, str):
        return f"{content}\n\n{text}"
    if not isinstance(content, Sequence):
        raise ValueError(f"content={short(content)}, expected text or a list of parts")
    return [*content, {"type": "text", "text": text}]
