"""Anthropic's endpoints: /v1/messages and count_tokens."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from support.dialects import MESSAGES, POSTS, USAGE, ask, read_events, talking_server
from support.needs import packages
from support.scripted_chat import user
from support.serving import Server, serving
from support.tool_talk import N_CTX, THINKS, spell, talking


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with talking_server(tmp_path_factory.mktemp("talk")) as server:
        yield server


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

    def test_stop_sequence(self, server: Server) -> None:
        change = {"stop_sequences": ["nowhere", "me see"]}
        found = ask(server, "/v1/messages", **change)
        assert found["content"][-1] == {"type": "text", "text": "Let "}
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "me see")
        events = read_events(
            server.ask("/v1/messages", {**MESSAGES, **change, "stream": True}).body
        )
        assert events[0]["message"]["stop_sequence"] is None
        assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "me see"}

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

    def test_consecutive_turns_are_one(self, tmp_path: Path) -> None:
        call = '<tool_call>{"name": "weather", "arguments": {"x": 1}}'
        prompt = f"1sBe brief;uHi\nthere;aI\nlook{call}{call};t3;t4;uOk\nthen;"
        use = {"type": "tool_use", "name": "weather", "input": {"x": 1}}
        uses = [{**use, "id": name} for name in "ab"]
        results = [
            {"type": "tool_result", "tool_use_id": name, "content": content}
            for name, content in (("a", "3"), ("b", "4"))
        ]
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "user", "content": "there"},
            {"role": "assistant", "content": "I"},
            {"role": "assistant", "content": [{"type": "text", "text": "look"}, uses[0]]},
            {"role": "assistant", "content": [uses[1]]},
            {"role": "user", "content": [results[0]]},
            {"role": "user", "content": [results[1], {"type": "text", "text": "Ok"}]},
            {"role": "user", "content": "then"},
        ]
        path = talking(tmp_path, {len(spell(prompt)): "Four."}, THINKS)
        with Generator(path) as generator, serving(generator) as server:
            found = ask(server, "/v1/messages", messages=messages, system="Be brief")
        assert found["content"] == [{"type": "text", "text": "Four."}]

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

    def test_errors_of_the_request_are_not_the_servers(self, server: Server) -> None:
        answer = server.ask("/v1/messages", method="GET")
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")
        assert answer.json()["error"]["type"] == "invalid_request_error"

    def test_prompt_that_is_too_long(self, server: Server) -> None:
        """LangChain, LiteLLM and others compare the message."""
        answer = server.ask("/v1/messages", {**MESSAGES, "messages": user("a" * N_CTX)})
        assert answer.status == 400
        assert answer.json()["error"] == {
            "type": "invalid_request_error",
            "message": f"prompt is too long: at least {N_CTX + 1} tokens > {N_CTX} maximum",
        }

    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
    def test_threads_are_refused_so_that_clients_do_without(
        self, server: Server, path: str
    ) -> None:
        """anthropic's tool runner asks for a thread and reads the details of the error."""
        answer = server.ask(path, {**POSTS[path], "thread": {"type": "create"}})
        assert answer.status == 400
        assert answer.json()["error"] == {
            "type": "invalid_request_error",
            "message": "thread is not supported, expected the whole conversation in messages",
            "details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        }

    def test_models(self, server: Server) -> None:
        """In the form of Anthropic's API if its client asks."""
        header = {"anthropic-version": "2023-06-01"}
        listed = server.ask("/v1/models?limit=1000", **header).json()
        [model] = listed["data"]
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (
            "tiny",
            "tiny",
            False,
        )
        assert (model["type"], model["id"], model["display_name"]) == ("model", "tiny", "tiny")
        created = datetime.fromisoformat(model["created_at"].replace("Z", "+00:00"))
        [other] = server.ask("/v1/models").json()["data"]
        assert created.timestamp() == other["created"]
        assert server.ask("/v1/models/tiny", **header).json() == model
        answer = server.ask("/v1/models/other", **header)
        assert (answer.status, answer.json()["type"]) == (404, "error")
        assert answer.json()["error"]["type"] == "not_found_error"
        assert server.ask("/v1/models/other").json()["error"]["code"] == "model_not_found"

    def test_models_with_a_wrong_key(self, tmp_path: Path) -> None:
        with (
            Generator(talking(tmp_path, {})) as generator,
            serving(generator, api_key="sesame") as server,
        ):
            answer = server.ask("/v1/models", **{"anthropic-version": "2023-06-01"})
        assert answer.status == 401
        assert answer.json() == {
            "type": "error",
            "error": {
                "type": "authentication_error",
                "message": "the API key is missing or wrong",
            },
        }

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


TEXT = {"type": "text", "text": "Hi"}
NOTES = {"type": "text", "media_type": "text/plain", "data": "It rains."}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}


class TestBlocksOfMessages:
    """Anthropic's."""

    def test_documents_are_text_and_redacted_thinking_is_ignored(self, tmp_path: Path) -> None:
        prompt = "uHi\nNotes\nOf May\nIt rains.;aOk;t4\nHi;uHi\nHi;"
        document = {"type": "document", "source": NOTES, "title": "Notes", "context": "Of May"}
        short = {"type": "document", "source": {"type": "content", "content": [TEXT]}}
        ok = [{"type": "redacted_thinking", "data": "EmwK"}, {"type": "text", "text": "Ok"}]
        result = {**RESULT, "content": [{"type": "text", "text": "4"}, short]}
        messages = [
            {"role": "user", "content": [TEXT, {**document, "citations": {"enabled": True}}]},
            {"role": "assistant", "content": ok},
            {"role": "user", "content": [result, TEXT, short]},
        ]
        model = talking(tmp_path, {len(spell(prompt)): "Yes."})
        with Generator(model) as generator, serving(generator) as server:
            body = {"messages": messages, "temperature": 0, "max_tokens": 9}
            answer = server.ask("/v1/messages", body).json()
        assert answer["content"] == [{"type": "text", "text": "Yes."}]

    def test_search_results_are_text(self, tmp_path: Path) -> None:
        prompt = "t4\nWeb\nx.org\nHi\nHi;uWeb\nx.org\nHi\nHi;"
        found = {
            "type": "search_result",
            "title": "Web",
            "source": "x.org",
            "content": [TEXT, TEXT],
            "citations": {"enabled": True},
        }
        result = {**RESULT, "content": [{"type": "text", "text": "4"}, found]}
        model = talking(tmp_path, {len(spell(prompt)): "Yes."})
        with Generator(model) as generator, serving(generator) as server:
            messages = [{"role": "user", "content": [result, found]}]
            body = {"messages": messages, "temperature": 0, "max_tokens": 9}
            answer = server.ask("/v1/messages", body).json()
        assert answer["content"] == [{"type": "text", "text": "Yes."}]

    @pytest.mark.parametrize(
        ("block", "message"),
        [
            (
                {"type": "document", "source": {"type": "url", "url": "x"}},
                "content.0.source.type: 'url' is not supported, expected 'text', 'content'",
            ),
            ({"type": "document", "source": {**NOTES, "type": "base64"}}, "'base64' is not"),
            ({"type": "document", "source": {**NOTES, "media_type": "text/html"}}, "'text/plain'"),
            (IMAGE, "content.0.type: 'image' is not supported, expected 'text', 'document'"),
        ],
    )
    def test_others_are_refused(self, tmp_path: Path, block: Any, message: str) -> None:
        with Generator(talking(tmp_path, {})) as generator, serving(generator) as server:
            body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 9}
            answer = server.ask("/v1/messages", body)
        assert answer.status == 400
        assert message in answer.json()["error"]["message"]

    def test_fields_of_claude_code_are_ignored(self, tmp_path: Path) -> None:
        tool = {"name": "f", "input_schema": {"type": "object"}, "eager_input_streaming": True}
        body = {
            "messages": user("Hi"),
            "tools": [tool],
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "mcp_servers": [],
            "fallbacks": [],
            "thinking": {"type": "between_tools"},
        }
        with Generator(talking(tmp_path, {})) as generator, serving(generator) as server:
            answer = server.ask("/v1/messages?beta=true", {**body, "max_tokens": 1})
            assert answer.status == 200
            assert server.ask("/v1/messages/count_tokens?beta=true", body).status == 200


@pytest.mark.parametrize(
    ("thinking", "enabled"),
    [
        (None, False),  # as in Anthropic's API: the first block is the text
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
    ],
)
@packages("fastapi")
def test_thinking_is_asked_for(thinking: dict[str, Any] | None, enabled: bool) -> None:
    from h2o_cpp.serve.messages_request import MessagesRequest

    body = {"max_tokens": 9, "messages": user("Hi"), "thinking": thinking}
    variables = MessagesRequest.model_validate(body).chat().conversation()["variables"]
    assert variables["enable_thinking"] is enabled
