"""The Anthropic, OpenAI Responses and Ollama endpoints: the same reply in each format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from support.chatty import user
from support.needs import packages
from support.serving import Server, serving
from support.tool_talk import THINKS, WEATHER, spell, talking

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Łódź"}}</tool_call>'
OUTPUT = f"<think>\nHm.\n</think>\nLet me see.\n{CALL}"
N_TOKENS = len(spell(OUTPUT))
N_PROMPT = len("1uHi;")
FUNCTION = WEATHER["function"]
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 900,
    "messages": user("Hi"),
    "temperature": 0,
    "tools": [{"name": "weather", "input_schema": FUNCTION["parameters"]}],
}
RESPONSES: dict[str, Any] = {
    "model": "tiny",
    "input": "Hi",
    "temperature": 0,
    "tools": [{"type": "function", **FUNCTION}],
}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": user("Hi"),
    "tools": [WEATHER],
    "options": {"temperature": 0},
}
USAGE = {
    "input_tokens": N_PROMPT,
    "cache_read_input_tokens": 0,
    "cache_creation_input_tokens": 0,
    "output_tokens": N_TOKENS,
}
POSTS = {
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": {"messages": user("Hi")},
    "/v1/responses": RESPONSES,
    "/api/chat": CHAT,
    "/api/generate": {"prompt": "Hi!", "options": {"temperature": 0}},
    "/api/embed": {"input": "Hi"},
    "/api/embeddings": {"prompt": "Hi"},
    "/api/show": {"model": "tiny"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("talk")
    with (
        Generator(talking(folder, {N_PROMPT: OUTPUT}, THINKS), max_sequences=3) as generator,
        serving(generator) as server,
    ):
        yield server


def read_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream; each event's name is its type."""
    found = []
    for event in body.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def ask(server: Server, path: str, **change: Any) -> Any:
    answer = server.ask(path, {**POSTS[path], **change})
    assert answer.status == 200, answer.body
    return answer.json()


class TestMessages:
    def test_response(self, server: Server) -> None:
        found = ask(server, "/v1/messages")
        thinking, text, use = found["content"]
        assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
        assert text == {"type": "text", "text": "Let me see."}
        assert (use["type"], use["name"], use["input"]) == ("tool_use", "weather", {"city": "Łódź"})
        assert found["stop_reason"] == "tool_use"
        assert found["usage"] == USAGE

    def test_stream(self, server: Server) -> None:
        found = read_events(server.ask("/v1/messages", {**MESSAGES, "stream": True}).body)
        assert [found[i]["type"] for i in (0, -2, -1)] == [
            *("message_start", "message_delta", "message_stop"),
        ]
        assert found[0]["message"]["content"] == []
        assert found[0]["message"]["stop_reason"] is None
        assert found[-2]["delta"]["stop_reason"] == "tool_use"
        assert found[-2]["usage"] == USAGE
        started: list[int] = []
        texts: dict[int, str] = {}
        for event in found[1:-2]:
            i = event["index"]
            if event["type"] == "content_block_start":
                assert i == len(started)
                started.append(i)
                texts[i] = ""
            elif event["type"] == "content_block_delta":
                assert started[-1] == i
                [text] = [value for name, value in event["delta"].items() if name != "type"]
                texts[i] += text
        assert texts == {0: "Hm.", 1: "Let me see.", 2: '{"city": "Łódź"}'}

    def test_max_tokens(self, server: Server) -> None:
        found = ask(server, "/v1/messages", max_tokens=3)
        assert found["stop_reason"] == "max_tokens"
        assert found["usage"]["output_tokens"] == 3

    def test_conversation(self, tmp_path: Path) -> None:
        prompt = (
            '1sBe\nbrief;uHi;aI look<tool_call>{"name": "weather", "arguments": {"x": 1}};t4;uOk;'
        )
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": "x"},
                    {"type": "text", "text": "I look"},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "4"},
                    {"type": "text", "text": "Ok"},
                ],
            },
        ]
        system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]
        path = talking(tmp_path, {len(spell(prompt)): "Four."}, THINKS)
        with Generator(path) as generator, serving(generator) as server:
            found = ask(server, "/v1/messages", messages=messages, system=system)
            assert found["content"] == [{"type": "text", "text": "Four."}]
            assert found["stop_reason"] == "end_turn"
            change = {"messages": messages, "system": system, "tools": MESSAGES["tools"]}
            n = ask(server, "/v1/messages/count_tokens", **change)
        assert n == {"input_tokens": len(spell(prompt))}

    def test_errors(self, server: Server) -> None:
        answer = server.ask("/v1/messages", {**MESSAGES, "max_tokens": 0})
        assert answer.status == 400
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        for name, message in (
            (None, "name is missing"),
            ("wether", "tool_choice='wether', expected one of"),
        ):
            choice = {"type": "tool", "name": name}
            answer = server.ask("/v1/messages", {**MESSAGES, "tool_choice": choice})
            assert message in answer.json()["error"]["message"]

    @packages("anthropic")
    def test_official_client(self, server: Server) -> None:
        import anthropic

        with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
            asked = {name: value for name, value in MESSAGES.items() if name != "temperature"}
            with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
                assert [*stream.text_stream] != []
                message = stream.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        call = message.content[2]
        assert isinstance(call, anthropic.types.ToolUseBlock)
        assert call.input == {"city": "Łódź"}


class TestResponses:
    def test_response(self, server: Server) -> None:
        found = ask(server, "/v1/responses")
        reasoning, message, call = found["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert message["content"][0]["text"] == "Let me see."
        assert (call["type"], call["name"]) == ("function_call", "weather")
        assert json.loads(call["arguments"]) == {"city": "Łódź"}
        assert found["status"] == "completed"
        assert found["usage"]["total_tokens"] == N_PROMPT + N_TOKENS

    def test_stream(self, server: Server) -> None:
        found = read_events(server.ask("/v1/responses", {**RESPONSES, "stream": True}).body)
        assert [event["sequence_number"] for event in found] == [*range(len(found))]
        ids = [event["item"]["id"].partition("_")[0] for event in found if "item" in event]
        assert ids == ["rs", "rs", "msg", "msg", "fc", "fc"]
        assert found[0]["type"] == "response.created"
        assert found[0]["response"]["status"] == "in_progress"
        last = found[-1]["response"]
        assert found[-1]["type"] == "response.completed"
        texts = ["", "", ""]
        for event in found:
            if event["type"].endswith(".delta"):
                texts[event["output_index"]] += event["delta"]
        assert texts == ["Hm.", "Let me see.", '{"city": "Łódź"}']
        done = [event["item"] for event in found if event["type"].endswith("item.done")]
        assert done == last["output"]

    def test_truncated_call(self, server: Server) -> None:
        body = {**RESPONSES, "stream": True, "max_output_tokens": N_TOKENS - 4}
        last = read_events(server.ask("/v1/responses", body).body)[-1]["response"]
        assert last["status"] == "incomplete"
        assert [item["status"] for item in last["output"]] == ["completed"] * 2 + ["incomplete"]
        assert last["output"][2]["arguments"].startswith('{"city": "')
        items = ask(server, "/v1/responses", max_output_tokens=N_TOKENS - 4)["output"]
        assert [item["type"] for item in items] == ["reasoning", "message"]

    def test_paths_of_llama_cpp(self, server: Server) -> None:
        assert server.ask("/responses", RESPONSES).json()["status"] == "completed"
        assert server.ask("/models").json()["data"][0]["id"] == "tiny"

    def test_incomplete(self, server: Server) -> None:
        found = ask(server, "/v1/responses", max_output_tokens=3)
        assert found["status"] == "incomplete"
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}

    def test_conversation(self, tmp_path: Path) -> None:
        prompt = '1sBe;uHi;aI look<tool_call>{"name": "weather", "arguments": {"x": 1}};t4;'
        called = {
            "type": "function_call",
            "call_id": "a",
            "name": "weather",
            "arguments": '{"x":1}',
        }
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "message", "role": "assistant", "content": "I look"},
            called,
            {"type": "function_call_output", "call_id": "a", "output": "4"},
        ]
        path = talking(tmp_path, {len(spell(prompt)): "Four."}, THINKS)
        with Generator(path) as generator, serving(generator) as server:
            found = ask(server, "/v1/responses", input=items, instructions="Be")
        assert found["output"][0]["content"][0]["text"] == "Four."

    @pytest.mark.parametrize(
        "change",
        [
            {"previous_response_id": "resp_1"},
            {"background": True},
            {"tool_choice": "required", "tools": []},
            {"tool_choice": {"type": "function", "name": "wether"}},
            {"tool_choice": {"type": "web_search"}},
            {"tools": [{"type": "web_search"}]},
            {"input": []},
            {"text": {"format": {"type": "yaml"}}},
        ],
    )
    def test_unsupported_requests(self, server: Server, change: Any) -> None:
        assert server.ask("/v1/responses", {**RESPONSES, **change}).status == 400

    @packages("openai")
    def test_official_client(self, server: Server) -> None:
        import openai

        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            with client.responses.stream(**RESPONSES) as stream:
                for _ in stream:
                    pass
                response = stream.get_final_response()
            assert response.output_text == "Let me see."
            assert client.responses.create(**RESPONSES).output_text == "Let me see."


class TestOllama:
    def test_chat(self, server: Server) -> None:
        found = ask(server, "/api/chat", stream=False)
        message = found["message"]
        assert (message["content"], message["thinking"]) == ("Let me see.", "Hm.")
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": {"city": "Łódź"}}
        assert (found["done"], found["done_reason"]) == (True, "stop")
        assert (found["prompt_eval_count"], found["eval_count"]) == (N_PROMPT, N_TOKENS)

    def test_streams_by_default(self, server: Server) -> None:
        answer = server.ask("/api/chat", CHAT)
        assert answer.headers["Content-Type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in answer.body.splitlines()]
        assert "".join(line["message"]["content"] for line in lines) == "Let me see."
        assert [c for line in lines for c in line["message"].get("tool_calls", [])] != []
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]

    def test_generate(self, server: Server) -> None:
        found = ask(server, "/api/generate", stream=False)
        assert (found["response"], found["thinking"]) == (f"Let me see.\n{CALL}", "Hm.")
        cut = {"temperature": 0, "num_predict": 4}
        found = ask(server, "/api/generate", stream=False, options=cut)
        assert found["done_reason"] == "length"
        assert found["eval_count"] == 4

    def test_raw(self, server: Server) -> None:
        found = ask(server, "/api/generate", stream=False, raw=True, prompt="12345")
        assert found["response"] == OUTPUT.replace("<tool_call>", "").replace("</tool_call>", "")

    def test_models(self, server: Server) -> None:
        n_bytes = server.app.state.service.generator.path.stat().st_size
        for path in ("/api/tags", "/api/ps"):
            [model] = server.ask(path).json()["models"]
            assert (model["name"], model["size"]) == ("tiny", n_bytes)
        assert server.ask("/api/show", {"name": "tiny"}).json() == ask(server, "/api/show")
        found = ask(server, "/api/show", model="tiny:latest")
        assert found["capabilities"] == ["completion", "embedding", "tools", "thinking"]
        assert found["template"] == THINKS
        assert "version" in server.ask("/api/version").json()

    def test_embed(self, server: Server) -> None:
        found = ask(server, "/api/embed", input=["Hi", "Ho"])
        assert [len(vector) for vector in found["embeddings"]] == [1024, 1024]
        old = ask(server, "/api/embeddings", model="tiny", options={"num_ctx": 64}, keep_alive=5)
        assert old["embedding"] == pytest.approx(found["embeddings"][0])
        assert ask(server, "/api/embeddings", prompt="") == {"embedding": []}

    def test_errors_are_strings(self, server: Server) -> None:
        answer = server.ask("/api/chat", {**CHAT, "model": "other"})
        assert answer.status == 404
        assert answer.json() == {"error": "there is no model 'other', expected one of 'tiny'"}
        assert server.ask("/api/chat", {**CHAT, "format": "yaml"}).status == 400

    @pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
    def test_preload(self, server: Server, path: str) -> None:
        key, value = {
            "/api/generate": ("response", ""),
            "/api/chat": ("message", {"role": "assistant", "content": ""}),
        }[path]
        empty: dict[str, Any] = {"prompt": ""} if path == "/api/generate" else {"messages": []}
        for more, reason in (
            ({}, "load"),
            (empty, "load"),
            ({"keep_alive": "5m"}, "load"),
            ({"keep_alive": 0}, "unload"),
            ({"keep_alive": "0s"}, "unload"),
        ):
            answer = server.ask(path, {"model": "tiny", **more})
            assert answer.status == 200
            found = answer.json()
            assert (found["done"], found["done_reason"]) == (True, reason)
            assert (found["model"], found[key]) == ("tiny", value)
            [model] = server.ask("/api/ps").json()["models"]  # a single model stays loaded
            assert model["name"] == "tiny"
        assert ask(server, "/api/generate", stream=False)["done_reason"] == "stop"

    def test_random_seed_and_ignored_options(self, server: Server) -> None:
        options = {"temperature": 0, "seed": -1, "num_ctx": 64, "use_mlock": True, "numa": False}
        found = ask(server, "/api/chat", stream=False, truncate=True, shift=True, options=options)
        assert found["message"]["content"] == "Let me see."
        answer = server.ask("/api/chat", {**CHAT, "options": {"seed": -2}})
        assert answer.status == 400

    @packages("ollama")
    def test_official_client(self, server: Server) -> None:
        import ollama

        with ollama.Client(host=server.url) as client:
            chunks = [*client.chat(**CHAT, stream=True)]
            assert client.list().models[0].model == "tiny"
        assert "".join(chunk.message.content or "" for chunk in chunks) == "Let me see."


def test_cached_tokens_are_reported(tmp_path: Path) -> None:
    """In the field of each API; Anthropic's input_tokens do not include them."""
    messages = user("Hi" * 50)
    n_prompt = len(f"u{messages[0]['content']};")
    with (
        Generator(talking(tmp_path, {}, THINKS), n_batch=32, prefix_cache="16MiB") as generator,
        serving(generator) as server,
    ):
        change = {"messages": messages, "tools": None, "max_tokens": 4}
        first, second = (ask(server, "/v1/messages", **change)["usage"] for _ in range(2))
        assert (first["input_tokens"], first["cache_read_input_tokens"]) == (n_prompt, 0)
        assert (second["input_tokens"], second["cache_read_input_tokens"]) == (1, n_prompt - 1)
        found = read_events(server.ask("/v1/messages", {**MESSAGES, **change, "stream": True}).body)
        assert found[0]["message"]["usage"] == {**second, "output_tokens": 0}
        assert found[-2]["usage"] == second
        chat = server.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 4}).json()
        assert chat["usage"]["prompt_tokens_details"] == {"cached_tokens": n_prompt - 1}
        change = {"input": messages, "tools": None, "max_output_tokens": 4}
        answer = ask(server, "/v1/responses", **change)
        assert answer["usage"]["input_tokens_details"] == {"cached_tokens": n_prompt - 1}


@pytest.mark.parametrize("path", POSTS)
def test_limits_and_api_keys_apply_to_every_endpoint(tmp_path: Path, path: str) -> None:
    with (
        Generator(talking(tmp_path, {}, THINKS)) as generator,
        serving(generator, max_body_bytes=2000, api_key=["one", "two"]) as server,
    ):
        body = json.dumps(POSTS[path]).encode()
        assert server.ask(path, body).status == 401
        assert server.ask(path, body, **{"x-api-key": "three"}).status == 401
        assert server.ask(path, body, **{"x-api-key": "two"}).status == 200
        key = {"Authorization": "Bearer one"}
        assert server.ask(path, b"x" * 2001, **key).status == 413
        assert server.ask(path, b"x", **key).status == 400
        assert server.ask(path, b'{"nothing": 1}', **key).status == 400
        assert server.metric("h2o_body_bytes") == 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/api/chat"])
def test_disconnected_client_frees_its_sequence(tmp_path: Path, path: str) -> None:
    from support.serving import wait_until

    body = {**POSTS[path], "stream": True}
    with (
        Generator(talking(tmp_path, {N_PROMPT: "a" * 900}, THINKS)) as generator,
        serving(generator) as server,
    ):
        connection = server.begin(body, path)
        connection.close()
        wait_until(lambda: server.metric("h2o_sequences_active") == 0)
        assert server.ask(path, {**body, "stream": False}).status == 200
