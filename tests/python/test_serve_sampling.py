"""Sampling options and limits of outputs as llama.cpp and Ollama spell them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator

pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")

from h2o_cpp.serve.openai_requests import CompletionRequest
from h2o_cpp.serve.schema import parse
from support.serving import Server, serving

MOST = 12
PROMPT = "The old man"
SAMPLED = {"prompt": PROMPT, "max_tokens": 10, "seed": 7, "temperature": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_opt: Path) -> Iterator[Server]:
    with (
        Generator(tiny_opt, n_ctx=64, max_sequences=3, threads=1) as generator,
        serving(generator, template="{{ messages[0].content }}", max_tokens=MOST) as server,
    ):
        yield server


def texts(server: Server, **change: Any) -> list[str]:
    answer = server.ask("/v1/completions", {**SAMPLED, **change})
    assert answer.status == 200, answer.body
    return [choice["text"] for choice in answer.json()["choices"]]


def ollama_text(server: Server, **options: Any) -> str:
    options = {"num_predict": 10, "seed": 7, "temperature": 1, "ignore_eos": True, **options}
    body = {"prompt": PROMPT, "raw": True, "stream": False, "options": options}
    answer = server.ask("/api/generate", body)
    assert answer.status == 200, answer.body
    text: str = answer.json()["response"]
    return text


@pytest.mark.parametrize(
    "off",
    [
        {"n_keep": 0, "n_discard": 0, "min_keep": 0, "n_probs": 0, "return_tokens": False},
        {"post_sampling_probs": False, "parse_tool_calls": True, "reasoning_format": "auto"},
        {"tfs_z": 1, "penalize_nl": False, "typical_p": 1, "top_n_sigma": -1},
        {"mirostat": 0, "repeat_last_n": -1, "dry_multiplier": 0, "dry_penalty_last_n": -1},
    ],
)
def test_values_of_llama_cpp_that_are_off(server: Server, off: dict[str, Any]) -> None:
    assert texts(server, **off) == texts(server)


@pytest.mark.parametrize(
    "off",
    [
        {"tfs_z": 1.0, "penalize_newline": True, "num_keep": 4, "embedding_only": False},
        {"mirostat": 0, "repeat_last_n": -1, "typical_p": 1},
        {"repeat_penalty": 0},
    ],
)
def test_values_of_ollama_that_are_off(server: Server, off: dict[str, Any]) -> None:
    assert ollama_text(server, **off) == ollama_text(server)


def test_whole_numbers_of_ollama_can_be_floats(server: Server) -> None:
    """JSON of other languages has no integers."""
    floats = {"seed": 8.0, "num_predict": 3.0, "top_k": 5.0, "mirostat": 0.0, "num_ctx": 64.0}
    integers = {name: int(value) for name, value in floats.items()}
    assert ollama_text(server, **floats) == ollama_text(server, **integers)
    for wrong in ({"seed": 8.5}, {"seed": 1e300}, {"temperature": 1e300}, {"top_k": True}):
        answer = server.ask("/api/generate", {"prompt": "a", "options": wrong})
        assert answer.status == 400


def test_temperatures_above_2(server: Server) -> None:
    [hot] = texts(server, temperature=3)
    assert hot == ollama_text(server, temperature=3) != ollama_text(server, temperature=2)


def test_top_k_below_1_is_all(server: Server) -> None:
    every = {"temperature": 2, "top_p": 1, "min_p": 0}
    [expected] = texts(server, **every, top_k=0)
    assert [expected] != texts(server, **every, top_k=1)
    assert [expected] == texts(server, **every, top_k=-1)
    assert expected == ollama_text(server, **every, top_k=-1)


def test_top_p_of_0_is_greedy(server: Server) -> None:
    assert texts(server, top_p=0) == texts(server, temperature=0) != texts(server)
    assert ollama_text(server, top_p=0) == ollama_text(server, temperature=0)
    for path, body in (
        ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 4}),
    ):
        assert server.ask(path, {**body, "top_p": 0}).status == 200


def test_negative_seeds(server: Server) -> None:
    """They are taken as unsigned, except for -1, which is no seed."""
    first, _, third = texts(server, seed=-2, n=3)
    assert [first] == texts(server, seed=-2) != [third]
    assert [third] == texts(server, seed=0)
    body = json.dumps({"prompt": "a", "seed": -1}).encode()
    assert parse(CompletionRequest, body).sampling() == {"seed": None}


COMPLETION = ("/v1/completions", {"prompt": PROMPT})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]})


def test_samplers(server: Server) -> None:
    for samplers in ("llama.cpp", ["top_k", "temperature"]):
        answer = server.ask(COMPLETION[0], {**COMPLETION[1], "max_tokens": 2, "samplers": samplers})
        assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    ("path", "body", "n"),
    [
        *((path, {**body, "max_tokens": -1}, MOST) for path, body in (COMPLETION, CHAT)),
        *((path, {**body, "n_predict": -1}, MOST) for path, body in (COMPLETION, CHAT)),
        *((path, {**body, "n_predict": 3}, 3) for path, body in (COMPLETION, CHAT)),
        (CHAT[0], {**CHAT[1], "max_completion_tokens": -1}, MOST),
    ],
)
def test_limits(server: Server, path: str, body: dict[str, Any], n: int) -> None:
    answer = server.ask(path, {**body, "ignore_eos": True})
    assert answer.status == 200, answer.body
    assert answer.json()["usage"]["completion_tokens"] == n


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_predict": 3}, "give either max_tokens or n_predict, not both"),
        ({"max_tokens": 0}, "max_tokens: Input should be -1 or greater than or equal to 1"),
        ({"max_tokens": -2}, "max_tokens: Input should be -1 or greater than or equal to 1"),
        ({"max_tokens": "12"}, "max_tokens: Input should be a valid integer"),
        ({"min_keep": 2}, "min_keep: Input should be 0"),
        ({"n_probs": 1}, "n_probs: Input should be less than or equal to 0"),
        ({"seed": -(2**63) - 1}, "seed: Input should be greater than or equal to"),
        ({"top_p": -0.1}, "top_p: Input should be greater than or equal to 0"),
    ],
)
def test_invalid_values(server: Server, change: dict[str, Any], message: str) -> None:
    answer = server.ask("/v1/completions", {**SAMPLED, **change})
    assert answer.status == 400
    assert message in answer.json()["error"]["message"]
