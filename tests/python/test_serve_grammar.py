"""Constrained outputs over HTTP with the fields of OpenAI, vLLM and llama.cpp; pydantic models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from support.example_schema import SCHEMA, conforms
from support.scripted_chat import PLAIN, user
from support.tool_talk import THINKS, WEATHER, talking

pytest.importorskip("fastapi", reason="FastAPI is not installed")
pytest.importorskip("llguidance", reason="grammars need llguidance")

from pydantic import ConfigDict, create_model

from support.serving import serving

CHAT = "/v1/chat/completions"
FORM = "response_format"


@pytest.fixture(scope="module")
def post(tiny_opt: Path) -> Iterator[Any]:
    with (
        Generator(tiny_opt, threads=1, max_sequences=3) as generator,
        serving(generator, template=PLAIN, max_queue=20) as server,
    ):

        def post(path: str = "completions", **body: Any) -> Any:
            chat = {"messages": [{"role": "user", "content": "Hi"}]}
            request = chat if path.startswith("chat") else {"prompt": "Hi"}
            return server.ask(f"/v1/{path}", {**request, "seed": 1, "max_tokens": 300, **body})

        yield post


def test_chat_with_json_schema(post: Any) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    answer = post("chat/completions", response_format=response_format, n=3).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(texts) == 3
    assert all(map(conforms, texts))


NEAR: dict[str, Any] = {
    **{"type": "object", "properties": {"near": {"type": "boolean"}}, "required": ["near"]}
}
NAMED = {"name": "n", "schema": NEAR}
AS_JSON = {"type": "json_schema", "schema": NEAR}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}},
        ),
        (CHAT, {"guided_json": NEAR}),
        (CHAT, {"structured_outputs": {"json": NEAR}}),
        (CHAT, {"json_schema": NEAR}),
        ("/api/chat", {"format": NEAR}),
        ("/v1/responses", {"text": {"format": {**AS_JSON, "name": "n", "strict": True}}}),
        ("/v1/messages", {"output_config": {"format": AS_JSON}, "max_tokens": 300}),
    ],
)
def test_one_rule_for_properties_without_a_name(
    tiny_opt: Path, path: str, fields: dict[str, Any]
) -> None:
    """They are not written unless the schema allows them."""
    talk = {"input": "Hi"} if path == "/v1/responses" else {"messages": user("Hi")}
    with (
        Generator(tiny_opt, threads=1) as generator,
        serving(generator, template=PLAIN) as server,
    ):
        answer = server.ask(path, {**talk, **fields, "stream": False})
    assert answer.status == 200, answer.body
    [text] = re.findall(rb'"(?:content|text)": ?("\{.*?\}")', answer.body)
    assert json.loads(json.loads(text)).keys() == {"near"}


FEW = {"type": "array", "items": {"type": "integer"}, "maxItems": 2, "uniqueItems": True}
DIGITS = {"type": "string", "pattern": "^(?!0)[0-9]{1,3}$", "maxLength": 3}


@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize("properties", [{"few": FEW}, {"few": FEW, "digits": DIGITS}])
def test_unsupported_keywords_only_matter_if_strict(
    tiny_opt: Path, properties: dict[str, Any], strict: bool | None
) -> None:
    closed = {"required": [*properties], "additionalProperties": False}
    schema = {"type": "object", "properties": properties, **closed}
    form = {"name": "x", "schema": schema, "strict": strict}
    chat_form = {"type": "json_schema", "json_schema": form}
    bodies: dict[str, Any] = {
        CHAT: {"messages": user("Hi"), "response_format": chat_form},
        "/v1/responses": {"input": "Hi", "text": {"format": {"type": "json_schema", **form}}},
        "/api/chat": {"messages": user("Hi"), "format": schema, "stream": False},
    }
    with (
        Generator(tiny_opt, threads=1) as generator,
        serving(generator, template=PLAIN) as server,
    ):
        for path, body in bodies.items():
            answer = server.ask(path, body)
            if strict and path != "/api/chat":
                assert answer.status == 400
                assert '["uniqueItems"]' in answer.json()["error"]["message"]
                continue
            assert answer.status == 200, answer.body
            found = answer.json()
            if path == CHAT:
                text = found["choices"][0]["message"]["content"]
            elif path == "/api/chat":
                text = found["message"]["content"]
            else:
                text = found["output"][0]["content"][0]["text"]
            value = json.loads(text)
            assert [*value] == [*properties]
            assert len(value["few"]) <= 2
            assert all(isinstance(one, int) for one in value["few"])
            assert len(value.get("digits", "")) <= 3


@pytest.mark.parametrize("name", ["response_format", "json_object", "json_schema", "format"])
def test_objects_have_only_known_properties_as_in_llama_cpp(tiny_opt: Path, name: str) -> None:
    """With small models, outputs would not end otherwise."""
    inner = {"type": "object", "properties": {"c": {"type": "boolean"}}}
    schema = {"type": "object", "properties": {"b": inner}, "required": ["b"]}
    form: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "json_object": {"type": "json_object", "schema": schema},
    }.get(name, schema)
    path = "/api/chat" if name == "format" else CHAT
    body = {"messages": user("Hi"), "stream": False, name.replace("json_object", FORM): form}
    with (
        Generator(tiny_opt, threads=1) as generator,
        serving(generator, template=PLAIN) as server,
    ):
        for seed in range(5):
            seeded = {"options": {"seed": seed}} if name == "format" else {"seed": seed}
            found = server.ask(path, {**body, **seeded}).json()
            message = found["message"] if name == "format" else found["choices"][0]["message"]
            value = json.loads(message["content"])
            assert [*value] == ["b"]
            assert {*value["b"]} <= {"c"}


@pytest.mark.parametrize("name", ["schema", "value"])
def test_json_object_with_schema(post: Any, name: str) -> None:
    """By llama.cpp's name and by Hugging Face's."""
    response_format: dict[str, Any] = {"type": "json_object", name: SCHEMA}
    answer = post("chat/completions", response_format=response_format).json()
    assert conforms(answer["choices"][0]["message"]["content"])
    for invalid in (3, {"type": "hiccup"}):
        response_format = {"type": "json_object", name: invalid}
        assert post("chat/completions", response_format=response_format).status == 400


def test_chat_with_json_object(post: Any) -> None:
    answer = post("chat/completions", response_format={"type": "json_object"}).json()
    [choice] = answer["choices"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].lstrip().startswith("{")


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("guided_regex", r"\d{3}", r"\d{3}"),
        ("guided_choice", ["yes", "no"], "yes|no"),
        ("guided_grammar", 'start: "a" | "b"', "a|b"),
        ("grammar", 'root ::= "a" | "b"', "a|b"),
        ("structured_outputs", {"regex": r"\d{3}"}, r"\d{3}"),
        ("structured_outputs", {"choice": ["yes", "no"]}, "yes|no"),
        ("structured_outputs", {"grammar": 'root ::= "a" | "b"'}, "a|b"),
        ("structured_outputs", {"json": {"enum": [1, 2]}}, "1|2"),
        ("structured_outputs", {"json": '{"enum": [1, 2]}'}, "1|2"),
        ("structured_outputs", {"json_object": True}, r"\s*\{[\s\S]*"),
        ("guided_json", {"enum": [1, 2]}, "1|2"),
        ("json_schema", {"enum": [1, 2]}, "1|2"),
    ],
)
def test_completion_fields(post: Any, field: str, value: Any, pattern: str) -> None:
    [choice] = post(**{field: value}).json()["choices"]
    assert re.fullmatch(pattern, choice["text"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"guided_json": {"type": "nope"}}, "schema: Invalid type"),
        ({"guided_regex": "("}, "regex: "),
        ({"grammar": "root ::= foo"}, "grammar: "),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "regex or choice"),
        ({"guided_json": {}, "json_schema": {}}, "give one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "regex or choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "there is no such field"),
    ],
)
def test_invalid_constraints(post: Any, body: dict[str, Any], message: str) -> None:
    answer = post(**body)
    assert answer.status == 400
    assert message in answer.json()["error"]["message"]


def test_output_format_begins_after_reasoning(tmp_path: Path) -> None:
    path = talking(tmp_path, {len("uHi;<think>"): "Hm.\n</think>\nHello"}, THINKS + "<think>")
    schema = {"enum": [7]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body: dict[str, Any] = {"messages": user("Hi")}
    with Generator(path) as generator, serving(generator) as server:
        [choice] = server.ask(CHAT, {**body, "response_format": form}).json()["choices"]
        assert choice["message"]["content"] == "7"
        assert choice["message"]["reasoning_content"] == "Hm."
        answer = server.ask("/api/chat", {**body, "format": schema, "stream": False}).json()
        assert answer["message"] == {"role": "assistant", "content": "7", "thinking": "Hm."}


def test_tool_call_instead_of_an_output_format(tmp_path: Path) -> None:
    """The model chooses."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
    path = talking(tmp_path, {len("1uHi;"): call, len("1uHello;"): '{"near": true}'})
    schema = {"type": "object", "properties": {"near": {"type": "boolean"}}, "required": ["near"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {"tools": [WEATHER], "response_format": form, "temperature": 0}
    with Generator(path) as generator, serving(generator) as server:
        called, answered = [
            server.ask(CHAT, {**body, "messages": user(text)}).json()["choices"][0]["message"]
            for text in ("Hi", "Hello")
        ]
        reply = generator.reply(user("Hi"), tools=[WEATHER], schema=schema, temperature=0)
    assert called["content"] is None
    assert called["tool_calls"][0]["function"]["arguments"] == '{"city": "Łódź"}'
    assert answered["content"] == '{"near": true}'
    assert "tool_calls" not in answered
    assert [call.name for call in reply.calls] == ["weather"]


def test_pydantic_model(tiny_opt: Path) -> None:
    model = create_model(
        "Point",
        __config__=ConfigDict(extra="forbid"),
        x=(int, ...),
        near=(bool, ...),
    )
    with Generator(tiny_opt, threads=1) as generator:
        text = generator.generate("Where?", schema=model, seed=1, max_tokens=300).text
    point = model.model_validate_json(text)
    assert isinstance(point.model_dump()["near"], bool)
