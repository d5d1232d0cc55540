"""Messages in the form that a chat template can render, and the text that a prompt continues."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from h2o_cpp.arguments import short
from h2o_cpp.model.marked_text import VALUE

Message = Mapping[str, Any]  # {"role": "user", "content": "Hello"}

# The key of a message's origin, until it is rendered: that of its texts, or runs of its content.
ORIGIN = "\0"

_ALL_CALLS = re.compile(r"""in\s+\w+(\.tool_calls|\[['"]tool_calls['"]\])""")
_READS_TOOLS = re.compile(r"""role(['"]\])?\s*[!=]=\s*['"]tool['"]""")
_NINE = re.compile(r"[a-zA-Z0-9]{9}")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names in chat templates


def for_template(messages: Sequence[Message], template: str) -> Sequence[Message]:
    """The same conversation in the form that a template can render."""
    if "System role not supported" in template:  # Gemma 1 and 2
        messages = _with_system_in_first(messages)
    if "tool_calls[0]" in template and not _ALL_CALLS.search(template):  # Llama 3, gpt-oss
        messages = [*_one_call_each(messages)]
    if "with length 9" in template:  # Mistral
        messages = [*_with_call_ids(messages)]
    if "tool_responses" in template and not _READS_TOOLS.search(template):  # Gemma 4
        messages = [*_with_responses(messages)]
    return [_with_reasoning(message, template) for message in messages]


def text_to_continue(messages: Sequence[Message]) -> str:
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


def _with_system_in_first(messages: Sequence[Message]) -> Sequence[Message]:
    """The first message's text begins with the system's."""
    if len(messages) < 2 or messages[0]["role"] != "system":
        return messages
    system, first, *others = messages
    instructions, text = system.get("content"), first.get("content")
    if first["role"] != "user" or not isinstance(instructions, str) or not isinstance(text, str):
        return messages
    head, between = instructions.strip(), "\n\n"
    runs = [
        (system.get(ORIGIN, VALUE), len(head)),
        (VALUE, len(between)),
        (first.get(ORIGIN, VALUE), len(text)),
    ]
    return [{**first, "content": f"{head}{between}{text}", ORIGIN: runs}, *others]


def _calls(message: Message) -> Sequence[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    if message["role"] != "assistant" or not isinstance(calls, Sequence):
        return ()
    return calls if all(isinstance(call, Mapping) for call in calls) else ()


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Several calls of a message become messages, each before its result."""
    rest = [*messages]
    while rest:
        message = rest.pop(0)
        calls = _calls(message)
        if len(calls) < 2:
            yield message
            continue
        results = [*takewhile(lambda one: one["role"] == "tool", rest)]
        del rest[: len(results)]
        ids = [id for call in calls if (id := call.get("id")) is not None]
        for i, call in enumerate(calls):
            own = {"role": "assistant", "content": ""} if i else message
            yield {**own, "tool_calls": [call]}
            of_call = [one for one in results if one.get("tool_call_id") == call.get("id") in ids]
            of_none = [one for one in results if one.get("tool_call_id") not in ids]
            for one in of_call or of_none[:1]:
                results.remove(one)
                yield one
        yield from results


def _with_responses(messages: Sequence[Message]) -> Iterator[Message]:
    """Results of calls are in the message that made them, or in one of the assistant's."""
    names: dict[Any, Any] = {}  # of tools, by the id of a call
    rest = [*messages]
    while rest:
        message = {"role": "assistant", "content": ""} if rest[0]["role"] == "tool" else rest.pop(0)
        functions = [(call.get("id"), call.get("function")) for call in _calls(message)]
        names |= {id: one.get("name") for id, one in functions if isinstance(one, Mapping)}
        results = [*takewhile(lambda one: one["role"] == "tool", rest)]
        if results and message["role"] == "assistant":
            del rest[: len(results)]
            responses = [
                {
                    "name": one.get("name") or names.get(one.get("tool_call_id")) or "unknown",
                    "response": one.get("content"),
                }
                for one in results
            ]
            message = {**message, "tool_responses": responses}
        yield message


def _with_call_ids(messages: Sequence[Message]) -> Iterator[Message]:
    """Calls have ids of nine letters and digits, and so have results."""
    open_calls: list[tuple[str, Any]] = []  # the id and name of calls without result
    n_calls = 0
    for message in messages:
        if calls := _calls(message):
            open_calls = []
            for call in calls:
                function = call.get("function")
                name = function.get("name") if isinstance(function, Mapping) else None
                open_calls.append((_nine(call.get("id"), n_calls), name))
                n_calls += 1
            ids = [id for id, _ in open_calls]
            named = [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]
            yield {**message, "tool_calls": named}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            if given is not None:
                id = _nine(given, n_calls)
            else:  # of the first call without result, of this name if there is one
                same = [call for call in open_calls if call[1] == message.get("name")]
                id = (same or open_calls or [(_nine(None, n_calls), None)])[0][0]
            open_calls = [call for call in open_calls if call[0] != id]
            yield {**message, "tool_call_id": id}
        else:
            yield message


def _nine(id: Any, number: int) -> str:
    """An id of nine letters and digits for one of any form, or for a call without."""
    if not isinstance(id, str) or not id:
        return f"call{number:05}"
    return id if _NINE.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]


def _with_reasoning(message: Message, template: str) -> Message:
    """Reasoning has the name that the template reads, whichever it is given by."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    if "reasoning_content" in template:
        message = {**message, "reasoning_content": reasoning}
    # gpt-oss refuses it beside content.
    alone = not message.get("content") or '"thinking" in message' not in template
    if "message.thinking" in template and "thinking" not in message and alone:
        message = {"thinking": reasoning, **message}
    return message
