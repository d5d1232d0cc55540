"""Fields of the Anthropic, OpenAI Responses and Ollama APIs that OpenAI's chats do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from support.chatty import user
from support.serving import serving
from support.tool_talk import spell, talking


def test_oldest_turns_are_left_out(tmp_path: Path) -> None:
    """The system's message stays, and a quarter of n_ctx is left for the output."""
    turns = [*user("abcde"), {"role": "assistant", "content": "abcde"}] * 10
    system = {"role": "system", "content": "Be"}
    n_system, n_turn = len("sBe;"), len("uabcde;aabcde;")
    n_last = len("uHi;")
    expected = n_system + 4 * n_turn + n_last
    assert expected <= 75 < expected + n_turn
    with (
        Generator(talking(tmp_path, {expected: "Yes."}), n_ctx=100) as generator,
        serving(generator) as server,
    ):
        messages = [system, *turns, *user("Hi")]
        body = {"input": messages, "temperature": 0}
        found = server.ask("/v1/responses", {**body, "truncation": "auto"}).json()
        assert found["output"][0]["content"][0]["text"] == "Yes."
        assert (found["truncation"], found["usage"]["input_tokens"]) == ("auto", expected)
        assert server.ask("/v1/responses", body).status == 400
        chat = {"messages": messages, "options": {"temperature": 0}, "stream": False}
        answer = server.ask("/api/chat", chat).json()
        assert (answer["message"]["content"], answer["prompt_eval_count"]) == ("Yes.", expected)
        assert server.ask("/api/chat", {**chat, "truncate": False}).status == 400
        for text, status in (("a" * 98, 200), ("a" * 99, 400)):  # "u", text and ";"
            body = {"input": [*turns, *user(text)], "truncation": "auto"}
            assert server.ask("/v1/responses", body).status == status
        for message in (system, turns[1]):
            body = {"input": [{**message, "content": "a" * 120}], "truncation": "auto"}
            assert server.ask("/v1/responses", body).status == 400


def test_larger_limits_than_the_servers(tmp_path: Path) -> None:
    """Those of Anthropic and Ollama are reduced, as their clients always send one."""
    model = talking(tmp_path, {len("Hi"): "a" * 20})
    with Generator(model) as generator, serving(generator, max_tokens=5) as server:
        body: dict[str, Any] = {"messages": user("Hi"), "temperature": 0, "max_tokens": 8192}
        answer = server.ask("/v1/messages", body).json()
        assert answer["content"] == [{"type": "text", "text": "a" * 5}]
        assert answer["stop_reason"] == "max_tokens"
        options = {"num_predict": 8192, "temperature": 0}
        ollama = {"messages": user("Hi"), "stream": False, "options": options}
        answer = server.ask("/api/chat", ollama).json()
        assert (answer["message"]["content"], answer["done_reason"]) == ("a" * 5, "length")
        for raw in (False, True):
            ollama = {"prompt": "Hi", "raw": raw, "stream": False, "options": options}
            answer = server.ask("/api/generate", ollama).json()
            assert (answer["response"], answer["done_reason"]) == ("a" * 5, "length")
        assert server.ask("/v1/chat/completions", body).status == 400
        assert server.ask("/v1/responses", {"input": "Hi", "max_output_tokens": 6}).status == 400


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
            ({**RESULT, "content": [IMAGE]}, "content.0.type: 'image' is not supported"),
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
        }
        with Generator(talking(tmp_path, {})) as generator, serving(generator) as server:
            answer = server.ask("/v1/messages?beta=true", {**body, "max_tokens": 1})
            assert answer.status == 200
            assert server.ask("/v1/messages/count_tokens?beta=true", body).status == 200
