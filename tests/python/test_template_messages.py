"""Conversations that some chat templates refuse, or render in part, in the form that they need."""

from __future__ import annotations

import json
from typing import Any

import pytest

from h2o_cpp.model.template_messages import ORIGIN, for_template

# Forms of the templates of Meta, OpenAI, Mistral AI and Google.
LLAMA_3 = """{%- if not message.tool_calls|length == 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}"""
GPT_OSS = """{%- if "thinking" in message %}{{ message.thinking }}{%- endif %}
{%- set tool_call = message.tool_calls[0] %}"""
MISTRAL = """{%- for tool_call in message.tool_calls %}{%- if tool_call.id|length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}"""
GEMMA_2 = "{{ raise_exception('System role not supported') }}"
GEMMA_4 = "{%- for tool_response in message['tool_responses'] -%}"
QWEN = "{%- for tool_call in m.tool_calls %}{{ m.tool_calls[0] }}"


def user(text: str = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def calls(*ids: str | None, **more: Any) -> dict[str, Any]:
    made = [
        {"type": "function", "function": {"name": f"f{i}", "arguments": {}}}
        | ({"id": id} if id else {})
        for i, id in enumerate(ids)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made, **more}


def result(id: str | None, content: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **({"tool_call_id": id} if id else {}), **more}


def told(messages: Any) -> list[str]:
    """Each message as the ids of its calls, or the text of a result."""
    return [
        ",".join(call.get("id", "-") for call in message["tool_calls"])
        if "tool_calls" in message
        else message["content"]
        for message in messages
    ]


@pytest.mark.parametrize("template", [LLAMA_3, GPT_OSS])
@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_one_call_each(template: str, order: list[str]) -> None:
    messages = [user(), calls("a", "b", content="Both."), *(result(id, f"of {id}") for id in order)]
    found = for_template([*messages, user("Thanks")], template)
    assert told(found) == ["Hi", "a", "of a", "b", "of b", "Thanks"]
    assert [message["content"] for message in found if "tool_calls" in message] == ["Both.", ""]
    assert told(messages) == ["Hi", "a,b", *(f"of {id}" for id in order)]


def test_one_call_each_without_ids() -> None:
    messages = [user(), calls(None, None), result(None, "1"), result(None, "2")]
    assert told(for_template(messages, LLAMA_3)) == ["Hi", "-", "1", "-", "2"]
    assert told(for_template([user(), calls("a", "b"), result("b", "2")], LLAMA_3)) == [
        "Hi", "a", "b", "2",
    ]  # fmt: skip
    one = [user(), calls("a"), result("a", "1")]
    assert told(for_template(one, LLAMA_3)) == ["Hi", "a", "1"]


@pytest.mark.parametrize("template", [QWEN, MISTRAL])
def test_templates_of_several_calls(template: str) -> None:
    messages = [user(), calls("a", "b"), result("a", "1"), result("b", "2")]
    assert len(for_template(messages, template)) == 4


def ids(messages: Any) -> list[str]:
    found = []
    for message in messages:
        found += [call["id"] for call in message.get("tool_calls", ())]
        found += [message["tool_call_id"]] if "tool_call_id" in message else []
    return found


def test_call_ids_of_nine_characters() -> None:
    messages = [user(), calls("call_abcdef", "abcdefgh9"), result("call_abcdef", "1")]
    first, second, again = ids(for_template([*messages], MISTRAL))
    assert len(first) == 9
    assert first.isalnum()
    assert (second, again) == ("abcdefgh9", first)
    assert ids(for_template(messages, QWEN)) == ids(messages)


def test_results_without_ids_are_of_the_calls_before() -> None:
    """Ollama's API takes both, in order or by name."""
    given = [user(), calls(None, None), result(None, "2", name="f1"), result(None, "1", name="f0")]
    given += [calls(None), result(None, "3")]
    found = ids(for_template(given, MISTRAL))
    assert found == [
        "call00000", "call00001", "call00001", "call00000", "call00002", "call00002",
    ]  # fmt: skip


def test_reasoning_of_gpt_oss() -> None:
    reasoning = {"reasoning_content": "Hm."}
    [before, after] = for_template([calls("a", **reasoning), calls("a")], GPT_OSS)
    assert before["thinking"] == "Hm."
    assert "thinking" not in after
    [beside] = for_template([calls("a", content="Let me see.", **reasoning)], GPT_OSS)
    assert "thinking" not in beside
    assert "thinking" not in for_template([calls("a", **reasoning)], QWEN)[0]


def test_results_of_gemma_4_are_in_the_message_of_the_calls() -> None:
    results = [result("a", '{"sum": 3}'), result("b", "cold", name="weather")]
    messages = [user(), calls("a", "b"), *results, calls("c"), result(None, "[1]"), user("Thanks")]
    found = for_template(messages, GEMMA_4)
    assert [message["role"] for message in found] == ["user", "assistant", "assistant", "user"]
    assert [message.get("tool_responses") for message in found] == [
        None,
        [{"name": "f0", "response": '{"sum": 3}'}, {"name": "weather", "response": "cold"}],
        [{"name": "unknown", "response": "[1]"}],
        None,
    ]
    [alone] = for_template([result("a", "1")], GEMMA_4)
    assert (alone["role"], alone["content"]) == ("assistant", "")
    reads = [GEMMA_4 + f"{{% if message['role'] {how} 'tool' %}}" for how in ("==", "!=")]
    for template in (QWEN, *reads):
        assert for_template(messages, template) == messages


def test_system_of_gemma() -> None:
    system = {"role": "system", "content": "Be brief.\n"}
    [found] = for_template([system | {ORIGIN: 4}, user() | {ORIGIN: 5}], GEMMA_2)
    assert found == user("Be brief.\n\nHi") | {ORIGIN: [(4, 9), (0, 2), (5, 2)]}
    for kept in ([system], [user(), system], [system, calls("a")]):
        assert for_template(kept, GEMMA_2) == kept
    assert json.dumps(for_template([system, user()], QWEN)) == json.dumps([system, user()])
