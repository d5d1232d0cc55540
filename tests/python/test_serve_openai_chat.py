"""Chats with OpenAI's official client: outputs equal those of Generator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from h2o_cpp.model.chat_turn import ChatPrompt
from support.scripted_chat import PLAIN

pytest.importorskip("openai", reason="OpenAI's client is not installed (openai)")

import openai

from support.openai_client import CACHE, MESSAGES, SAMPLED, client_of, tiny_server
from support.serving import Server, serving

CHAT: dict[str, Any] = {"model": "tiny", "messages": MESSAGES}


@pytest.fixture(scope="module")
def alone(tiny_opt: Path) -> Iterator[Generator]:
    with Generator(tiny_opt, **CACHE) as generator:
        yield generator


@pytest.fixture(scope="module")
def server(tiny_opt: Path) -> Iterator[Server]:
    with tiny_server(tiny_opt) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with client_of(server) as client:
        yield client


class TestChat:
    def test_response(self, client: Any, alone: Generator) -> None:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, **SAMPLED)
        expected = "".join(alone.chat(MESSAGES, template=PLAIN, **SAMPLED))
        assert answer.object == "chat.completion"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content == expected
        assert answer.choices[1].message.content != expected
        n = len(alone.chat_template(PLAIN).tokens(MESSAGES))
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (n, 40)

    def test_stream(self, client: Any, alone: Generator) -> None:
        chunks = [
            *client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **SAMPLED)
        ]
        expected = "".join(alone.chat(MESSAGES, template=PLAIN, **SAMPLED))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        assert chunks[0].choices[0].delta.role == "assistant"
        assert {chunk.choices[0].delta.role for chunk in chunks[1:]} == {None}
        assert chunks[-1].choices[0].finish_reason == "length"

    def test_content_parts_and_max_completion_tokens(self, client: Any) -> None:
        """Also fields that are ignored."""
        parts = [{"type": "text", "text": "A "}, {"type": "text", "text": "ship?"}]
        entry = client.chat.completions.create(
            model="tiny",
            messages=[MESSAGES[0], {"role": "user", "content": parts}],
            max_completion_tokens=20,
            seed=7,
            temperature=0.9,
            user="somebody",
            presence_penalty=0,
        )
        other = client.chat.completions.create(model="tiny", messages=MESSAGES, **SAMPLED)
        assert entry.choices[0].message.content == other.choices[0].message.content

    @pytest.mark.parametrize(
        "fields",
        [
            {"tools": [], "tool_choice": "none", "parallel_tool_calls": False},
            {"functions": [], "function_call": "auto"},
            {"response_format": {"type": "text"}, "modalities": ["text"]},
            {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "n": 1},
            {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "top_logprobs": 0},
            {"prompt_cache_key": "k", "safety_identifier": "s", "user": "u"},
            {"stop": None, "tools": None, "response_format": None, "logprobs": None},
            {"extra_body": {"cache_prompt": True, "reasoning_effort": "none"}},
            {"prediction": {"type": "content", "content": "Sail"}, "prompt_cache_retention": "24h"},
            {"extra_body": {"prompt_cache_options": {"mode": "implicit"}, "verbosity": "low"}},
            {"extra_body": {"id_slot": 0, "timings_per_token": True, "return_progress": True}},
        ],
    )
    def test_ignored_fields(self, client: Any, fields: dict[str, Any]) -> None:
        body = partial(client.chat.completions.create, model="tiny", messages=MESSAGES, **SAMPLED)
        assert body(**fields).choices[0].message.content == body().choices[0].message.content

    @pytest.mark.parametrize(
        ("message", "content"),
        [
            ({"content": None, "refusal": "No."}, "No."),
            ({"content": None}, ""),
            ({}, ""),
            ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
            (
                {"content": "Yes.", "refusal": None, "annotations": [{"type": "url_citation"}]},
                "Yes.",
            ),
            ({"content": [{"type": "text", "text": "Yes.", "cache_control": {}}]}, "Yes."),
            # of Mistral, LiteLLM and OpenRouter
            ({"prefix": True, "cache_control": {"type": "ephemeral"}}, "Yes."),
            ({"provider_specific_fields": {"a": 1}, "thinking_blocks": [{}]}, "Yes."),
            ({"reasoning_items": [{"type": "reasoning"}], "images": None}, "Yes."),
            ({"reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]}, "Yes."),
            # of OpenAI's client
            ({"parsed": {"a": 1}, "audio": None, "function_call": None}, "Yes."),
        ],
    )
    def test_earlier_replies(
        self, client: Any, alone: Generator, message: Any, content: str
    ) -> None:
        reply = {"role": "assistant", "content": content}
        expected = alone.chat_template(PLAIN).prompt([*MESSAGES, reply, MESSAGES[1]]).tokens
        messages = [*MESSAGES, {**reply, **message}, MESSAGES[1]]
        answer = client.chat.completions.create(model="tiny", messages=messages, **SAMPLED)
        assert answer.choices[0].message.content == alone.generate(expected, **SAMPLED).text

    def test_messages_passed_to_the_template(self, client: Any, server: Server) -> None:
        """For a conversation with a tool call."""
        call = {"name": "f", "arguments": '{"x": 1}'}
        without = {"name": "g", "arguments": ""}
        found = server.app.state.service.template
        messages = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "A ship?", "name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "reasoning": "Hm.",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": call},
                    {"id": "b", "type": "function", "function": without},
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "yes"},
        ]
        received: list[Any] = []

        def prompt(messages: Any, **_: Any) -> ChatPrompt:
            received.extend(messages)
            return ChatPrompt([5], thinking=False)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(found, "prompt", prompt)
            client.chat.completions.create(model="tiny", messages=messages, **SAMPLED)
        called = {"name": "f", "arguments": {"x": 1}}
        assert received == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "A ship?", "name": "ann"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": called},
                    {"id": "b", "type": "function", "function": {"name": "g", "arguments": {}}},
                ],
            },
            {"role": "tool", "content": "yes", "tool_call_id": "a"},
        ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": "the sea " * 600}]}, "context length is 512"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "not both"),
        ({"messages": [{"role": "user"}]}, "content is missing"),
        ({"messages": [{"role": "user", "content": None}]}, "content is missing"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
    ],
)
def test_invalid_chats(client: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**{**CHAT, **change})


def test_model_without_chat_template(tiny_opt: Path) -> None:
    with Generator(tiny_opt, threads=1) as generator, serving(generator) as server:
        answer = server.ask("/v1/chat/completions", CHAT)
        assert answer.status == 400
        assert "no chat template" in answer.json()["error"]["message"]
