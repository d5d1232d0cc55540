"""Tools and reasoning over HTTP: calls, deltas and errors."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from support.dialects import CALL
from support.needs import packages
from support.scripted_chat import user
from support.serving import Server, events, serving
from support.tool_talk import THINKS, TOOLS, WEATHER, spell, talking

PATH = "/v1/chat/completions"
ARGUMENTS = '{"city": "Łódź"}'
OUTPUT = f"<think>\nHm.\n</think>\nLet me see.\n{CALL}\n{CALL}"
# The model outputs OUTPUT after a prompt of N tokens: "1uHi;" with a tool, "uHi!;" without.
N = len("1uHi;")
MESSAGES = "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"
REQUEST: dict[str, Any] = {"messages": user("Hi"), "tools": [WEATHER], "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("talk")
    with (
        Generator(talking(folder, {N: OUTPUT}, THINKS), max_sequences=3) as generator,
        serving(generator) as server,
    ):
        yield server


def deltas(body: bytes) -> list[dict[str, Any]]:
    *chunks, done = events(body)
    assert done == "[DONE]"
    return [chunk["choices"][0]["delta"] for chunk in chunks]


def called(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a stream; id, type and name are only in the first delta of a call."""
    calls: list[dict[str, Any]] = []
    for piece in [piece for delta in found for piece in delta.get("tool_calls", [])]:
        if piece["index"] == len(calls):
            assert {*piece} == {"index", "id", "type", "function"}
            calls.append(piece)
        else:
            assert {*piece["function"]} == {"arguments"}
            assert {*piece} == {"index", "function"}
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return calls


def test_template_for_tools(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"
    long = "Hi" * 50
    replies: Any = {len("1uHi;"): CALL, len(f"u{long};"): "Hello"}
    model = talking(tmp_path, replies, plain, tool_use=TOOLS)
    with Generator(model, max_sequences=2) as generator, serving(generator) as server:
        [choice] = server.ask(PATH, REQUEST).json()["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
        other = {**REQUEST, "messages": user(long), "tools": []}
        [choice] = server.ask(PATH, other).json()["choices"]
        assert choice["message"]["content"] == "Hello"
        [one] = server.ask("/v1/models").json()["data"]
        assert "tools" in server.ask("/api/show", {"model": one["id"]}).json()["capabilities"]


def test_calls_in_a_response(server: Server) -> None:
    answer = server.ask(PATH, REQUEST).json()
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me see."
    assert message["reasoning_content"] == "Hm."
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("Hm.")}
    first, second = message["tool_calls"]
    assert first["function"] == second["function"] == {"name": "weather", "arguments": ARGUMENTS}
    assert first["type"] == "function"
    assert first["id"] != second["id"]
    assert len(first["id"]) == 9
    assert {*first["id"]} <= {*string.ascii_letters, *string.digits}


def test_calls_in_a_stream(server: Server) -> None:
    answer = server.ask(PATH, {**REQUEST, "stream": True})
    found = deltas(answer.body)
    assert found[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in found) == "Let me see."
    assert "".join(delta.get("reasoning_content") or "" for delta in found) == "Hm."
    pieces = [call for delta in found for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in pieces] == sorted(call["index"] for call in pieces)
    assert [call["function"] for call in called(found)] == [
        {"name": "weather", "arguments": ARGUMENTS}
    ] * 2
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in events(answer.body)[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls_false(server: Server, stream: bool) -> None:
    answer = server.ask(PATH, {**REQUEST, "parallel_tool_calls": False, "stream": stream})
    if stream:
        calls = called(deltas(answer.body))
    else:
        calls = answer.json()["choices"][0]["message"]["tool_calls"]
    assert len(calls) == 1


@pytest.mark.parametrize("tools", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_call_without_tools_is_content(server: Server, tools: Any) -> None:
    body = {"messages": user("Hi!"), "temperature": 0, **tools}
    [choice] = server.ask(PATH, body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == f"Let me see.\n{CALL}\n{CALL}"
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_call_that_begins_in_the_final_message(tmp_path: Path, stream: bool) -> None:
    """It is sent completely, the text before it is not."""
    beginning, rest = "I look. <tool_call>{", CALL.partition("{")[2]
    messages = [*user("Hi"), {"role": "assistant", "content": beginning}]
    model = talking(tmp_path, {len(spell(f"1uHi;a{beginning}")): rest}, THINKS)
    with Generator(model) as generator, serving(generator) as server:
        answer = server.ask(PATH, {**REQUEST, "messages": messages, "stream": stream})
    if stream:
        found = deltas(answer.body)
        [call] = called(found)
        assert not any(delta.get("content") for delta in found)
    else:
        [choice] = answer.json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}


def test_truncated_call_is_content(server: Server) -> None:
    n_tokens = len(spell(OUTPUT)) - len(spell(CALL)) - 5
    [choice] = server.ask(PATH, {**REQUEST, "max_tokens": n_tokens}).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith("Let me see.\n<tool_call>{")


def test_truncated_streamed_call_is_incomplete(server: Server) -> None:
    n_tokens = len(spell(OUTPUT)) - len(spell(CALL)) - 5
    answer = server.ask(PATH, {**REQUEST, "stream": True, "max_tokens": n_tokens})
    found = deltas(answer.body)
    [call] = called(found)
    assert call["function"]["name"] == "weather"
    assert call["function"]["arguments"] == ARGUMENTS[:-2]
    assert "".join(delta.get("content") or "" for delta in found) == "Let me see."
    assert events(answer.body)[-2]["choices"][0]["finish_reason"] == "length"


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = talking(tmp_path_factory.mktemp("talk"), {N: "I will not."})
    with Generator(model, max_sequences=3) as generator, serving(generator) as server:
        yield server


# Without additionalProperties: false, random bytes would add arguments without end.
STRICT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {**WEATHER["function"]["parameters"], "additionalProperties": False},
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_are_the_only_ones(server: Server) -> None:
    """OUTPUT follows a prompt with one tool."""
    other = {"type": "function", "function": {"name": "other"}}
    body = {**REQUEST, "tools": [other, WEATHER]}
    answer = server.ask(PATH, {**body, "tool_choice": allowed("auto", "weather")})
    [choice] = answer.json()["choices"]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["weather"] * 2
    tools = [{"type": "function", **tool["function"]} for tool in body["tools"]]
    weather = {"type": "function", "name": "weather"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [weather]}
    asked = {"input": "Hi", "tools": tools, "tool_choice": choice, "temperature": 0}
    answer = server.ask("/v1/responses", asked)
    assert answer.json()["output"][-1]["name"] == "weather"
    assert answer.json()["tool_choice"] == choice


@packages("llguidance")
class TestRequiredCalls:
    """With a model that would reply with text."""

    @pytest.mark.parametrize("choice", ["required", NAMED, allowed("required", "weather")])
    @pytest.mark.parametrize("stream", [False, True])
    def test_chats(self, refusing: Server, choice: Any, stream: bool) -> None:
        body = {
            **REQUEST,
            "tools": [STRICT],
            "tool_choice": choice,
            "temperature": 1,
        }
        if choice != NAMED:  # calls a named function once
            body["parallel_tool_calls"] = False
        for seed in range(3):
            answer = refusing.ask(PATH, {**body, "seed": seed, "stream": stream})
            if stream:
                [call] = called(deltas(answer.body))
            else:
                [choice] = answer.json()["choices"]
                assert choice["finish_reason"] == "tool_calls"
                assert choice["message"]["content"] is None
                [call] = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"])["city"] in ("Graz", "Łódź")

    def test_output_format_does_not_apply(self, refusing: Server) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [7]}}}
        forms = ({"response_format": schema}, {"guided_regex": "7"}, {"grammar": "root ::= [7]"})
        for form in forms:
            body = {**REQUEST, "tools": [STRICT], "tool_choice": "required", **form}
            [choice] = refusing.ask(PATH, body).json()["choices"]
            assert choice["message"]["content"] is None
            assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"

    def test_responses(self, refusing: Server) -> None:
        tool = {"type": "function", **STRICT["function"]}
        for choice in ("required", {"type": "function", "name": "weather"}):
            body = {"input": "Hi", "tools": [tool], "tool_choice": choice, "temperature": 0}
            answer = refusing.ask("/v1/responses", {**body, "parallel_tool_calls": False}).json()
            [item] = answer["output"]
            assert (item["type"], item["name"]) == ("function_call", "weather")
            assert answer["tool_choice"] == choice

    def test_messages(self, refusing: Server) -> None:
        function = STRICT["function"]
        tool = {"name": function["name"], "input_schema": function["parameters"]}
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            body = {
                "messages": user("Hi"),
                "tools": [tool],
                "tool_choice": {**choice, "disable_parallel_tool_use": True},
                "max_tokens": 300,
                "temperature": 0,
            }
            answer = refusing.ask("/v1/messages", body).json()
            [block] = answer["content"]
            assert (block["type"], block["name"]) == ("tool_use", "weather")
            assert answer["stop_reason"] == "tool_use"

    def test_json_schema_in_every_api(self, refusing: Server) -> None:
        schema = {"type": "object", "properties": {"city": {"enum": ["Graz", "Łódź"]}},
                  "required": ["city"], "additionalProperties": False}  # fmt: skip
        json_format = {"type": "json_schema", "name": "place", "schema": schema}
        body = {"input": "Hi", "text": {"format": json_format}, "temperature": 0}
        answer = refusing.ask("/v1/responses", body).json()
        assert json.loads(answer["output"][0]["content"][0]["text"])["city"] in ("Graz", "Łódź")
        assert answer["text"]["format"] == {**json_format, "description": None, "strict": None}
        body = {"messages": user("Hi"), "max_tokens": 100, "temperature": 0}
        form = {"type": "json_schema", "schema": schema}
        for change in ({"output_config": {"format": form}}, {"output_format": form}):
            answer = refusing.ask("/v1/messages", {**body, **change}).json()
            assert json.loads(answer["content"][0]["text"])["city"] in ("Graz", "Łódź")
        ollama = {"format": schema, "stream": False, "options": {"temperature": 0}}
        answer = refusing.ask("/api/chat", {"messages": user("Hi"), **ollama}).json()
        assert json.loads(answer["message"]["content"])["city"] in ("Graz", "Łódź")
        answer = refusing.ask("/api/generate", {"prompt": "Hi", **ollama}).json()
        assert json.loads(answer["response"])["city"] in ("Graz", "Łódź")
        invalid = {"type": "json_schema", "schema": {"type": "objekt"}}
        answer = refusing.ask("/v1/messages", {**body, "output_config": {"format": invalid}})
        assert answer.status == 400

    def test_tool_choice_in_python(self, tmp_path: Path) -> None:
        with Generator(talking(tmp_path, {N: "No."})) as generator:
            for choice in ("required", "weather"):
                reply = generator.reply(
                    user("Hi"), tools=[STRICT], tool_choice=choice, temperature=0, max_tokens=300
                )
                assert reply.content == ""
                assert reply.calls[0].name == "weather"
            with pytest.raises(ValueError, match="tool_choice='f', expected one of"):
                generator.reply(user("Hi"), tools=[STRICT], tool_choice="f")
            with pytest.raises(ValueError, match="tool_choice or regex"):
                generator.reply(user("Hi"), tools=[STRICT], tool_choice="weather", regex="a")


def test_logprobs_of_a_stream_with_calls(server: Server) -> None:
    answer = server.ask(PATH, {**REQUEST, "stream": True, "logprobs": True})
    chunks = events(answer.body)[:-1]
    tokens = [t for c in chunks for t in c["choices"][0]["logprobs"]["content"]]
    assert len(tokens) == len(spell(OUTPUT))


class TestInvalidRequests:
    def error_message(self, server: Server, **fields: Any) -> str:
        answer = server.ask(PATH, {**REQUEST, **fields})
        assert answer.status == 400
        message: str = answer.json()["error"]["message"]
        return message

    def test_unknown_tool(self, server: Server) -> None:
        choice = {"type": "function", "function": {"name": "wether"}}
        assert "tool_choice='wether', expected one of" in self.error_message(
            server, tool_choice=choice
        )
        assert "tool_choice allows 'wether', expected one of weather" in self.error_message(
            server, tool_choice=allowed("auto", "wether")
        )
        assert "tools is empty" in self.error_message(server, tool_choice="required", tools=[])

    @packages("llguidance")
    def test_invalid_schema(self, server: Server) -> None:
        parameters = {"type": "object", "properties": {"city": {"type": "text"}}}
        function = {"name": "weather", "parameters": parameters, "strict": True}
        tools = [{"type": "function", "function": function}]
        message = self.error_message(server, tool_choice="required", tools=tools)
        assert message == "the parameters of tool weather: Invalid type: text"
        tool = {"name": "weather", "input_schema": parameters, "strict": True}
        body = {"messages": user("Hi"), "tools": [tool], "max_tokens": 20}
        body["tool_choice"] = {"type": "any"}
        answer = server.ask("/v1/messages", body)
        assert (answer.status, answer.json()["error"]["message"]) == (400, message)
        del function["strict"]
        body = {**REQUEST, "tools": tools, "tool_choice": "required", "max_tokens": 20}
        assert server.ask(PATH, body).status == 200

    def test_invalid_tools(self, server: Server) -> None:
        assert "name" in self.error_message(server, tools=[{"type": "function", "function": {}}])
        assert "type" in self.error_message(server, tools=[{"type": "code_interpreter"}])

    def test_a_parser_needs_a_template_with_tools(self, tmp_path: Path) -> None:
        with (
            Generator(talking(tmp_path, {}, "{{ messages[0].content }}")) as generator,
            serving(generator, tool_parser="llama3") as server,
        ):
            assert "does not support tools" in self.error_message(server)

    def test_tool_parser_option(self, tmp_path: Path) -> None:
        text = '{"name": "weather", "parameters": {}}'
        with (
            Generator(talking(tmp_path, {len("1u;"): text}, "1u;{{ '' }}{# tools #}")) as generator,
            serving(generator, tool_parser="llama3") as server,
        ):
            [choice] = server.ask(PATH, REQUEST).json()["choices"]
            assert choice["message"]["content"] is None
            assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize("template", [MESSAGES, "{% if tools %}X{% endif %}" + MESSAGES])
def test_templates_without_a_known_format(
    template: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Generator(talking(tmp_path, {}, template)) as generator:
        prompt = generator.chat_template().turn(user("Hi"), tools=[WEATHER]).prompt
        text = generator.tokenizer.decode(prompt.tokens)
    assert json.dumps(WEATHER, ensure_ascii=False) in text
    model = talking(tmp_path, {len(text.encode()): f"Let me see.\n{CALL}"}, template)
    with Generator(model) as generator, serving(generator) as server:
        for _ in range(2):
            [choice] = server.ask(PATH, REQUEST).json()["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] == "Let me see."
            [call] = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
        shown = server.ask("/api/show", {"model": "tiny"}).json()
        assert "tools" not in shown["capabilities"]
    assert capfd.readouterr().err.count("tools are described in the system prompt") == 1


@packages("openai")
def test_openai_client(server: Server) -> None:
    """Its messages can be sent back, with the fields that it adds for strict tools."""
    import openai

    tool = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        request: Any = {"messages": user("Hi"), "tools": [tool], "temperature": 0}
        with client.chat.completions.stream(model="tiny", **request) as stream:
            for _ in stream:
                pass
            message: Any = stream.get_final_completion().choices[0].message
        assert message.tool_calls[0].function.parsed_arguments == {"city": "Łódź"}
        request["messages"] = [*user("Hi"), message, *user("Go on")]
        client.chat.completions.create(model="tiny", **request)
    assert message.content == "Let me see."
    assert [json.loads(c.function.arguments) for c in message.tool_calls] == [{"city": "Łódź"}] * 2


def test_second_turn(tmp_path: Path) -> None:
    """The client's messages reach the template, including calls and their results."""
    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *user("Hi"),
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "a", "content": "4"},
    ]
    value = '1uHi;a<tool_call>{"name": "f", "arguments": {"x": 1}};t4;'
    with (
        Generator(talking(tmp_path, {len(spell(value)): "Four."}, TOOLS)) as generator,
        serving(generator) as server,
    ):
        body = {"messages": messages, "tools": [WEATHER], "temperature": 0}
        [choice] = server.ask(PATH, body).json()["choices"]
    assert choice["message"]["content"] == "Four."


@packages("llguidance")
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_the_model_begins_follow_the_schema(tmp_path: Path, stream: bool) -> None:
    """The model would write a city that is not one of the enum, after text of its own."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "x": 1}}\n</tool_call>'
    path = talking(tmp_path, {len("1uHi;"): f"Let me see {{Rome}}.\n{call}"})
    body = {"messages": user("Hi"), "tools": [WEATHER], "temperature": 0, "stream": stream}
    with Generator(path) as generator, serving(generator) as server:
        answer = server.ask("/v1/chat/completions", body)
        reply = generator.reply(user("Hi"), tools=[WEATHER], temperature=0)
    if stream:
        deltas = [event["choices"][0]["delta"] for event in events(answer.body)[:-1]]
        content = "".join(delta.get("content", "") for delta in deltas)
        functions = [one["function"] for delta in deltas for one in delta.get("tool_calls", ())]
        arguments = "".join(function["arguments"] for function in functions)
    else:
        message = answer.json()["choices"][0]["message"]
        content = message["content"]
        [found] = message["tool_calls"]
        arguments = found["function"]["arguments"]
    assert content == reply.content == "Let me see {Rome}."
    assert json.loads(arguments) in ({"city": "Graz"}, {"city": "Łódź"})
    assert [json.loads(one.arguments) for one in reply.calls] == [json.loads(arguments)]


@packages("llguidance")
def test_calls_of_tools_without_a_grammar_are_free(tmp_path: Path) -> None:
    """The reply is what the model writes, like without the extra."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    strange = {"type": "function", "function": {"name": "weather", "parameters": {"type": "nope"}}}
    path = talking(tmp_path, {len("1uHi;"): call})
    with Generator(path) as generator, serving(generator) as server:
        body = {"messages": user("Hi"), "tools": [strange], "temperature": 0}
        [choice] = server.ask("/v1/chat/completions", body).json()["choices"]
    [found] = choice["message"]["tool_calls"]
    assert json.loads(found["function"]["arguments"]) == {"city": "Rome"}
