"""A server of a model that reasons and calls a tool, and a request to it in each API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from h2o_cpp import Generator
from support.chatty import user
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


@contextmanager
def talking_server(folder: Path) -> Iterator[Server]:
    """A server that answers the requests of POSTS with OUTPUT."""
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
