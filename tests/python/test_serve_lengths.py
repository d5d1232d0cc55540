"""Conversations longer than the context."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Chat, Generator, PromptMemory
from h2o_cpp.cli import main
from support.scripted_chat import PLAIN, says, user
from support.serving import Defaults, Server, serving

LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"
N_CTX = 40  # as it was trained
LONG = "Once upon a time there was an old man. " * 20
MESSAGES = [{"role": "system", "content": "Be brief."}, *user(LONG)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with (
        Generator(LLAMA, hh=12, threads=1) as generator,
        serving(generator, template=PLAIN) as server,
    ):
        assert generator.endless
        assert generator.n_ctx == N_CTX
        yield server


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/responses", {"input": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES[1:], "system": "Be brief.", "max_tokens": 5}),
        ("/api/chat", {"messages": MESSAGES, "stream": False}),
        ("/api/generate", {"prompt": LONG, "stream": False}),
    ],
)
def test_any_length_with_a_budget(server: Server, path: str, body: dict[str, Any]) -> None:
    answer = server.ask(path, body)
    assert answer.status == 200, answer.body
    found = answer.json()
    usage = found.get("usage", found)
    names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
    [n_prompt] = [usage[name] for name in names if name in usage]
    n_prompt += usage.get("cache_read_input_tokens", 0)
    assert n_prompt > 3 * N_CTX
    memory = usage["prompt_memory"]
    assert memory["dropped_tokens"] == memory["archived_tokens"] == 0
    # 2 layers with 2 KV heads of 12 tokens each, among them the same 6 recent ones
    assert n_prompt - 4 * 12 <= memory["evicted_tokens"] <= n_prompt - 6


def chunks(body: bytes) -> list[Any]:
    """The objects of a stream of events, named or not."""
    lines = (line.removeprefix(b"data: ") for line in body.splitlines())
    return [json.loads(line) for line in lines if line.startswith(b"{")]


@pytest.mark.parametrize("stream", [False, True])
def test_dropped_tokens_are_reported(tmp_path: Path, stream: bool) -> None:
    with (
        says(tmp_path, {"Hi": "Hello!"}, n_ctx=100) as generator,
        serving(generator, defaults=Defaults(truncation="auto")) as server,
    ):
        messages = [*user("Hi"), {"role": "assistant", "content": "a" * 90}, *user("Hi")]
        n_whole = len(generator.chat_template().tokens(messages))
        n_read = len(generator.chat_template().tokens(user("Hi")))
        of_messages = [None, None, 1.0]
        memory = {
            "dropped_tokens": n_whole - n_read,
            "evicted_tokens": 0,
            "archived_tokens": 0,
        }
        body = {"messages": messages, "stream": stream, "max_tokens": 3}
        answer = server.ask(
            "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
        )
        found = chunks(answer.body)[-1] if stream else answer.json()
        usage = found["usage"]
        assert (usage["prompt_tokens"], usage["prompt_memory"]) == (n_read, memory)
        assert found["message_memory"] == of_messages
        answer = server.ask("/v1/messages", body)
        found = chunks(answer.body)[-2] if stream else answer.json()
        assert (found["usage"]["prompt_memory"], found["message_memory"]) == (memory, of_messages)
        answer = server.ask("/v1/responses", {"input": messages, "stream": stream})
        found = chunks(answer.body)[-1]["response"] if stream else answer.json()
        assert (found["usage"]["prompt_memory"], found["message_memory"]) == (memory, of_messages)
        answer = server.ask("/api/chat", body)
        found = json.loads(answer.body.splitlines()[-1])
        assert (found["prompt_memory"], found["message_memory"]) == (memory, of_messages)
        reply = generator.reply(messages, truncation="auto", max_tokens=3)
        assert reply.generation.prompt_memory == PromptMemory(**memory, messages=tuple(of_messages))


@pytest.mark.parametrize("archive", [None, "f16"])
def test_evicted_tokens_are_those_that_no_head_keeps(archive: str | None) -> None:
    prompt = [5 + i % 50 for i in range(35)]
    with Generator(LLAMA, hh=8, archive=archive, threads=1) as generator:
        stream = generator.stream(prompt, max_tokens=4, ignore_eos=True)
        list(stream)
        kept = {
            int(position)
            for layer in range(generator.stats().n_layers)
            for head in range(generator.stats().n_kv_heads)
            for position in generator.kept(layer, head)[0]
        }
        n = sum(i not in kept for i in range(len(prompt)))
        assert n > 0
        expected = PromptMemory(0, n, n if archive else 0)
        assert stream.prompt_memory == stream.generation().prompt_memory == expected
        with generator.engine() as engine:
            completion = engine.submit(prompt, max_tokens=4, ignore_eos=True)
            assert completion.result().prompt_memory == completion.prompt_memory
            assert completion.prompt_memory.archived_tokens == (
                completion.prompt_memory.evicted_tokens if archive else 0
            )


def test_a_reply_is_as_long_wherever_it_begins() -> None:
    with Generator(LLAMA, hh=12, threads=1) as generator:
        chat = Chat(generator, template=PLAIN)
        for _ in range(4):
            stream = chat.say("Go on.", ignore_eos=True, seed=1)
            list(stream)
            assert len(stream.tokens) == N_CTX


@pytest.mark.parametrize("protect", [None, "system"])
def test_chat_drops_the_oldest_turns(tmp_path: Path, protect: Any) -> None:
    """Where positions cannot roll; `messages` keeps them."""
    with says(tmp_path, {"Hi": "Hello!", "Bye": "."}, n_ctx=100) as generator:
        with pytest.raises(ValueError, match="truncation='no', expected 'error' or 'auto'"):
            Chat(generator, truncation="no")  # type: ignore[arg-type]
        for truncation, n_turns in (("error", 3), ("auto", 12)):
            kind: Any = {"truncation": truncation, "protect": protect}
            chat = Chat(generator, system="Be", **kind)
            for _ in range(n_turns):
                list(chat.say("Go on", max_tokens=3, ignore_eos=True))
            if truncation == "error":
                with pytest.raises(ValueError, match="n_ctx is 100"):
                    chat.say("Go on")
            assert len(chat.messages) == 1 + 2 * n_turns
            tokens = chat.tokens
            assert len(tokens) <= 100
            assert bytes(tokens[1:9]) == b"system\nB"


def test_the_end_of_a_chat_names_the_ways_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(LLAMA)
    options = ["--template", PLAIN, "--threads", "1", "--seed", "1", "--ignore-eos", "-c", "40"]

    def err(*more: str, lines: str = "Go on\nGo on\n") -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        main(["chat", "-m", model, *options, *more])
        return capsys.readouterr().err

    assert err().count("/budget 0.2 to go on without a limit, or /reset") == 2
    with_budget = err("--hh", "12")
    assert "/budget" not in with_budget
    assert with_budget.count("generated 40 tokens") == 2
    moved = err(lines="Go on\n/budget 12\nGo on\nGo on\n")
    assert moved.count("/budget 0.2 to go on") == 1
    assert moved.count("generated 40 tokens") == 2
    assert "error" not in moved
