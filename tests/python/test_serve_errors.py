"""Validation errors name the field, and what it should be."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")

from pydantic import BaseModel

from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.messages_request import CountRequest, MessagesRequest
from h2o_cpp.serve.ollama_requests import OllamaChatRequest
from h2o_cpp.serve.openai_requests import ChatRequest, CompletionRequest
from h2o_cpp.serve.responses_request import ResponsesRequest
from h2o_cpp.serve.schema import parse

USER = {"role": "user", "content": "Hi"}
NUMBER = "Input should be a valid integer or a valid number"
TEXTS = "Input should be a valid string or a valid array"
EMPTY = "List should have at least 1 item after validation, not 0"
POSITIVE = "Input should be greater than or equal to 0"
SHORT = "String should have at least 1 character"
REQUIRED = "Field required"
CHOICES = "Input should be 'none', 'auto' or 'required'"


@pytest.mark.parametrize(
    ("model", "body", "param", "message"),
    [
        (CompletionRequest, {"hh": "x"}, "hh", NUMBER),
        (CompletionRequest, {"temperature": "x"}, "temperature", "Input should be a valid number"),
        (CompletionRequest, {"prompt": 5}, "prompt", TEXTS),
        (CompletionRequest, {"prompt": []}, "prompt", EMPTY),
        (CompletionRequest, {"prompt": [-1]}, "prompt.0", POSITIVE),
        (CompletionRequest, {"prompt": [[], [1]]}, "prompt.0", EMPTY),
        (CompletionRequest, {"prompt": [[1], [-1]]}, "prompt.1.0", POSITIVE),
        (CompletionRequest, {"prompt": [1, "a"]}, "prompt.1", "Input should be a valid integer"),
        (CompletionRequest, {"prompt": ["a", 1]}, "prompt.1", "Input should be a valid string"),
        (CompletionRequest, {"stop": ""}, "stop", SHORT),
        (CompletionRequest, {"stop": ["a", ""]}, "stop.1", SHORT),
        (CompletionRequest, {"best_of": 2}, "best_of", "Input should be 1"),
        (CompletionRequest, {"foo": 1}, "foo", "there is no such field"),
        (ChatRequest, {"messages": None}, "messages", REQUIRED),
        (ChatRequest, {"messages": [{"role": None, "content": "a"}]}, "messages.0.role", REQUIRED),
        (ChatRequest, {"tool_choice": "xx"}, "tool_choice", CHOICES),
        (
            ChatRequest,
            {"tool_choice": {"type": "x"}},
            "tool_choice.type",
            "'x' is not supported, expected 'function', 'allowed_tools'",
        ),
        (ChatRequest, {"messages": [{**USER, "content": 5}]}, "messages.0.content", TEXTS),
        (
            ChatRequest,
            {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
            "'image_url' is not supported, expected 'text', 'refusal'",
        ),
        (
            ChatRequest,
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            REQUIRED,
        ),
        (
            ChatRequest,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "x": 1}},
            "response_format.x",
            "there is no such field",
        ),
        (
            ChatRequest,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format.json_schema.x",
            "there is no such field",
        ),
        (MessagesRequest, {}, "max_tokens", REQUIRED),
        (
            ChatRequest,
            {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
            "tools.0.type",
            "Input should be 'function'",
        ),
        (
            MessagesRequest,
            {"max_tokens": 1, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools.0.type",
            "Input should be 'custom'",
        ),
        (
            ResponsesRequest,
            {"input": [USER, {"type": "function_call", "call_id": "a", "name": "f"}]},
            "input.1.arguments",
            REQUIRED,
        ),
        (ResponsesRequest, {"input": [5]}, "input.0", "Input should be an object"),
        (ChatRequest, {"tool_choice": {}}, "tool_choice.type", REQUIRED),
        (
            ChatRequest,
            {"messages": [{**USER, "content": [{"text": "a"}]}]},
            "messages.0.content.0.type",
            REQUIRED,
        ),
        (
            ResponsesRequest,
            {"input": [USER, {"type": "web_search_call", "id": "ws_1"}]},
            "input.1.type",
            "'web_search_call' is not supported, expected 'message', 'function_call', "
            "'function_call_output', 'reasoning', 'item_reference'",
        ),
        (
            MessagesRequest,
            {"max_tokens": 1, "tools": [{"type": "custom", "max_uses": 1}]},
            "tools.0.max_uses",
            "there is no such field",
        ),
    ],
)  # fmt: skip
def test_errors(model: type[BaseModel], body: dict[str, Any], param: str, message: str) -> None:
    complete = {CompletionRequest: {"prompt": "a"}, ResponsesRequest: {}}
    body = {**complete.get(model, {"messages": [USER]}), **body}
    with pytest.raises(ApiError) as error:
        parse(model, json.dumps(body).encode())
    assert error.value.param == param
    assert str(error.value) == f"{param}: {message}"


def test_null_is_no_value() -> None:
    assert parse(CompletionRequest, b'{"prompt": null}').prompt == ""
    body = {"prompt": "a", "max_tokens": None, "prediction": None}
    assert parse(CompletionRequest, json.dumps(body).encode()).max_tokens == 16


def test_invalid_json_has_no_field() -> None:
    with pytest.raises(ApiError, match="Invalid JSON") as error:
        parse(CompletionRequest, b"{")
    assert error.value.param is None


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
def test_optional_fields_can_be_null(model: type[BaseModel]) -> None:
    """Clients send so the options that are not given."""
    needed = {"prompt": "a"} if model is CompletionRequest else {"messages": [USER]}
    nulls = dict.fromkeys(model.model_fields.keys() - needed.keys())
    parse(model, json.dumps({**nulls, **needed}).encode())


TEXT = {"type": "text", "text": "Hi"}
ANTHROPIC: dict[str, Any] = {
    "max_tokens": 1,
    "system": [TEXT],
    "messages": [
        {
            "role": "user",
            "content": [
                TEXT,
                {"type": "document", "source": {"type": "text", "data": "a"}},
                {"type": "document", "source": {"type": "content", "content": [TEXT]}},
                {"type": "search_result", "title": "a", "source": "b", "content": [TEXT]},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm."},
                {"type": "redacted_thinking"},
                {"type": "tool_use", "id": "a", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [TEXT]}],
        },
    ],
}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CONVERSATIONS: list[tuple[Any, dict[str, Any]]] = [
    (
        ChatRequest,
        {
            "messages": [
                {"role": "user", "content": [TEXT]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "a", "content": "b"},
            ]
        },
    ),
    (
        ResponsesRequest,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [
                        {"type": "output_text", "text": "a"},
                        {"type": "refusal", "refusal": "b"},
                    ],
                },
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [{"type": "input_text", "text": "c"}],
                },
            ]
        },
    ),
    (MessagesRequest, ANTHROPIC),
    (CountRequest, ANTHROPIC),
    (
        OllamaChatRequest,
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
                },
            ]
        },
    ),
]


def with_new_fields(value: Any) -> Any:
    """The value with an unknown field in each object, except in the arguments of calls."""
    if isinstance(value, list):
        return [with_new_fields(one) for one in value]
    if not isinstance(value, dict):
        return value
    changed = {
        key: one
        if key in ("arguments", "input") and isinstance(one, dict)
        else with_new_fields(one)
        for key, one in value.items()
    }
    return {**changed, "new_field": {"role": "x"}}


@pytest.mark.parametrize(("model", "body"), CONVERSATIONS)
def test_unknown_fields_of_earlier_replies_are_ignored(
    model: type[BaseModel], body: dict[str, Any]
) -> None:
    """At any depth: clients send a reply back with fields of their own."""
    talk = {name: with_new_fields(body[name]) for name in {"messages", "input", "system"} & {*body}}
    assert parse(model, json.dumps({**body, **talk}).encode()) == parse(
        model, json.dumps(body).encode()
    )


def test_a_count_takes_the_body_of_a_message() -> None:
    """Fields that do not change the prompt do not matter."""
    more = {"stream": True, "temperature": 0.5, "stop_sequences": ["x"], "new_field": 1}
    body = {"messages": [USER], "max_tokens": 20, "metadata": {"user_id": "x"}, **more}
    assert parse(CountRequest, json.dumps(body).encode()).messages[0].content == "Hi"
    with pytest.raises(ApiError, match="new_field: there is no such field"):
        parse(MessagesRequest, json.dumps(body).encode())
