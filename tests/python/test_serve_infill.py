"""Filling in the middle, in llama.cpp's, OpenAI's and Ollama's forms, and /completion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from h2o_cpp.model.infill import Infill
from support.scripted_opt import END, integers, scripted_opt, strings, u32
from support.serving import Server, events, serving
from support.vocabularies import byte_pairs

PRE, SUF, MID, SEP, REP = range(1, 6)
QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>"]
DEEPSEEK = [f"<\uff5cfim\u2581{name}\uff5c>" for name in ("begin", "hole", "end")]
N_PROMPT = len("pabsysm")  # [PRE] a b [SUF] y [MID], or as many tokens without these


def model(folder: Path, *, names: list[str] = QWEN, keys: dict[str, int] | None = None) -> Path:
    """A model that writes "x = 1" and begins another file after prompts of 6 tokens."""
    script = [END] * 64
    reply = [*b"x = 1", SEP, *b"no"]
    script[5 : 5 + len(reply)] = reply
    found = scripted_opt(script)
    tokens = byte_pairs()["tokenizer.ggml.tokens"]
    tokens = [tokens[0], *names, *tokens[1 + len(names) : 257], "ab"]
    found.keys["tokenizer.ggml.tokens"] = strings(tokens)
    types = [1] + [3] * len(names) + [1] * (255 - len(names)) + [3, 1]
    found.keys["tokenizer.ggml.token_type"] = integers(types)
    found.keys["tokenizer.ggml.merges"] = strings([])
    for name, token in (keys or {}).items():
        found.keys[f"tokenizer.ggml.{name}_token_id"] = u32(token)
    return found.write(folder / "infill.gguf")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Generator(model(tmp_path), threads=1) as generator, serving(generator) as server:
        yield server


def test_prompt_is_that_of_the_family(tmp_path: Path) -> None:
    """In the order of Qwen's documentation, whose special tokens the text has."""
    with Generator(model(tmp_path)) as generator:
        tokenizer = generator.tokenizer
        infill = Infill.of(tokenizer, {})
        assert infill is not None
        text = "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
        expected = tokenizer.encode(text, parse_special=True)
        assert infill.prompt("a", "b") == expected
        text = "<|repo_name|>myproject\n<|file_sep|>f.py\nx<|file_sep|>g.py\n" + text
        expected = tokenizer.encode(text, parse_special=True)
        assert infill.prompt("a", "b", files=[("f.py", "x"), ("g.py", "")]) == expected
        assert infill.ends == {SEP: "<|file_sep|>", REP: "<|repo_name|>"}


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["<fim-prefix>", "<fim-suffix>", "<fim-middle>"], {}),
        (DEEPSEEK, {}),
        (["a1", "b1", "c1"], {"fim_pre": PRE, "fim_suf": SUF, "fim_mid": MID}),
        (["a1", "b1", "c1"], {"prefix": PRE, "suffix": SUF, "middle": MID}),
    ],
)
def test_tokens_by_key_or_text(tmp_path: Path, names: list[str], keys: dict[str, int]) -> None:
    path = model(tmp_path, names=names, keys=keys)
    with Generator(path, threads=1) as generator, serving(generator) as server:
        body = {"prompt": "ab", "suffix": "y", "temperature": 0, "max_tokens": 5}
        answer = server.ask("/v1/completions", body).json()
    assert answer["usage"]["prompt_tokens"] == N_PROMPT - 1
    assert answer["choices"][0]["text"] == "x = 1"


GREEDY = {"temperature": 0}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "ab", "suffix": "y", "max_tokens": 20, **GREEDY}),
    ("/api/generate", {"prompt": "ab", "suffix": "y", "options": GREEDY}),
    (
        "/infill",
        {
            **{"input_prefix": "a", "prompt": "b", "input_suffix": "y", **GREEDY},
            # llama.vim's
            **{"n_indent": 4, "t_max_predict_ms": 500, "samplers": ["top_k", "top_p", "infill"]},
            **{"cache_prompt": True, "response_fields": ["content"], "input_extra": []},
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_text_between_prefix_and_suffix(
    server: Server, path: str, body: dict[str, Any], stream: bool
) -> None:
    """It ends where another file would begin."""
    answer = server.ask(path, {**body, "stream": stream})
    assert answer.status == 200, answer.body
    if path.startswith("/api/"):
        pieces = [json.loads(line)["response"] for line in answer.body.splitlines()]
    else:
        chunks = events(answer.body) if stream else [answer.json()]
        texts = [one["choices"][0] if "choices" in one else one for one in chunks if "[" not in one]
        pieces = [one["content" if path == "/infill" else "text"] for one in texts]
    assert "".join(pieces) == "x = 1"


def test_models_without_these_tokens(tiny_opt: Path) -> None:
    with Generator(tiny_opt, threads=1) as generator, serving(generator) as server:
        for path, body in REQUESTS:
            answer = server.ask(path, body)
            assert answer.status == 400
            assert b"the model has no tokens to fill in the middle" in answer.body


@pytest.mark.parametrize(
    ("change", "message"),
    [({"prompt": ["a", "b"]}, "expected one prompt"), ({"prompt": [7]}, "expected text")],
)
def test_prompts_that_have_no_middle(server: Server, change: Any, message: str) -> None:
    answer = server.ask("/v1/completions", {"suffix": "y", **change})
    assert answer.status == 400
    assert message in answer.json()["error"]["message"]


class TestCompletion:
    """llama.cpp's."""

    BODY: dict[str, Any] = {"prompt": "abcdef", "temperature": 0}  # noqa: RUF012

    def test_answer(self, server: Server) -> None:
        answer = server.ask("/completion", {**self.BODY, "n_predict": 5, "new_field": 1}).json()
        assert (answer["content"], answer["stop"], answer["stop_type"]) == ("x = 1", True, "limit")
        assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (6, 5)
        timings = answer["timings"]
        assert (timings["prompt_n"], timings["predicted_n"], timings["cache_n"]) == (6, 5, 0)
        assert timings["predicted_ms"] > 0

    def test_stream(self, server: Server) -> None:
        *pieces, last = events(server.ask("/completion", {**self.BODY, "stream": True}).body)
        assert "".join(piece["content"] for piece in pieces) + last["content"] == "x = 1no"
        assert {piece["stop"] for piece in pieces} == {False}
        assert (last["stop"], last["stop_type"], last["model"]) == (True, "eos", "tiny")

    def test_stop_string(self, server: Server) -> None:
        answer = server.ask("/completion", {**self.BODY, "stop": ["="]}).json()
        assert (answer["content"], answer["stop_type"]) == ("x ", "word")
        assert answer["stopping_word"] == "="

    def test_several_prompts(self, server: Server) -> None:
        answer = server.ask("/completion", {**self.BODY, "prompt": ["abcdef", "fedcba"]}).json()
        assert [(one["index"], one["content"]) for one in answer] == [
            (0, "x = 1no"),
            (1, "x = 1no"),
        ]
