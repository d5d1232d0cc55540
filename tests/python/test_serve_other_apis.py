"""Fields of the Anthropic, OpenAI Responses and Ollama APIs that OpenAI's chats do not have."""

from __future__ import annotations

from pathlib import Path

from h2o_cpp import Generator
from support.chatty import user
from support.serving import serving
from support.tool_talk import talking


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
