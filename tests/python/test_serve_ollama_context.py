"""Ollama's /api/generate with `context`, the tokens of an earlier prompt and its reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Chat, Generator
from support.scripted_chat import says
from support.serving import Defaults, Server, serving

GREEDY = {"temperature": 0, "num_predict": 20}
TURNS = {"Hi": "Hello.", "Who?": "A ship.", "No": "Yes."}


@pytest.fixture
def generator(tmp_path: Path) -> Iterator[Generator]:
    with says(tmp_path, TURNS) as generator:
        yield generator


def ask(server: Server, prompt: str, **fields: Any) -> dict[str, Any]:
    """The answer; with stream, its last line."""
    body = {"prompt": prompt, "options": GREEDY, "stream": False, **fields}
    answer = server.ask("/api/generate", body)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = json.loads(answer.body.splitlines()[-1])
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_turns_are_those_of_a_chat(generator: Generator, stream: bool) -> None:
    chat = Chat(generator)
    for message, reply in TURNS.items():
        assert "".join(chat.say(message, temperature=0)) == reply
    with serving(generator) as server:
        context = None
        for message in TURNS:
            last = ask(server, message, context=context, stream=stream)
            context = last["context"]
        assert context == chat.tokens
        assert stream or last["response"] == "Yes."


def test_the_context_includes_the_system_message(generator: Generator) -> None:
    with serving(generator) as server:
        first = ask(server, "Hi")
        again = ask(server, "Who?", context=first["context"], system="Be brief.")
        assert again == {**ask(server, "Who?", context=first["context"]), **_times(again)}
        assert again["response"] == "A ship."


def _times(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in answer.items()
        if name.endswith("_duration") or name == "created_at"
    }


def test_without_a_chat_template(tiny_opt: Path) -> None:
    with Generator(tiny_opt, threads=1) as generator, serving(generator) as server:
        first = ask(server, "The old man")
        assert first["context"][:-20] == generator.tokenize("The old man")
        more = generator.tokenizer.encode(" said", add_special=False, begins=False)
        again = ask(server, " said", context=first["context"])
        expected = generator.generate([*first["context"], *more], temperature=0, max_tokens=20)
        assert again["response"] == expected.text
        assert again["prompt_eval_count"] == len(first["context"]) + len(more)


def test_a_long_context_is_cut(generator: Generator) -> None:
    context = [*range(10, 20), *[46] * generator.n_ctx]
    most = generator.n_ctx * 3 // 4
    with serving(generator, defaults=Defaults(truncation="auto")) as server:
        for keep in (4, 8):
            options = {**GREEDY, "num_predict": 1, "num_keep": keep}
            prompt = ask(server, "Hi", context=context, options=options)["context"][:most]
            assert prompt[: keep + 1] == [*context[:keep], 46]
            assert bytes(prompt[-10:]) == b"assistant\n"
        answer = server.ask(
            "/api/generate", {"prompt": "Hi", "context": context, "truncate": False}
        )
        assert answer.status == 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": [5], "raw": True}, "context is given, but raw is set"),
        ({"context": [10**6]}, "1000000"),
        ({"context": [-1]}, "context.0"),
    ],
)
def test_refused(generator: Generator, change: dict[str, Any], message: str) -> None:
    with serving(generator) as server:
        answer = server.ask("/api/generate", {"prompt": "Hi", **change})
        assert answer.status == 400
        assert message in answer.json()["error"]
        assert "context" not in ask(server, "Hi", raw=True)
