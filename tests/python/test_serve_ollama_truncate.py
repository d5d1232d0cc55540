"""Prompts that are too long, where they may lose their beginning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from support.scripted_chat import user
from support.serving import Defaults, Server, serving
from support.tool_talk import talking

N_CTX = 100
MOST = 75  # the rest is for the output
LONG = "".join(chr(97 + i * i % 26) for i in range(3 * N_CTX))
OPTIONS = {"num_predict": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = talking(tmp_path_factory.mktemp("talk"), {})
    with (
        Generator(model, n_ctx=N_CTX) as generator,
        serving(generator, defaults=Defaults(truncation="auto")) as server,
    ):
        yield server


def tokens_of(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, **body: Any
) -> tuple[list[int], int]:
    """The prompt, and its length according to the answer."""
    submit, prompts = server.engine.submit, []

    def submit_and_note(prompt: list[int], *args: Any, **options: Any) -> Any:
        prompts.append(prompt)
        return submit(prompt, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "submit", submit_and_note)
        if path.startswith("/api"):
            body = {"options": OPTIONS, **body}
        answer = server.ask(path, {"stream": False, **body})
    assert answer.status == 200, answer.body
    found = answer.json()
    n = found["prompt_eval_count"] if "usage" not in found else found["usage"]["prompt_tokens"]
    return prompts[-1], n


def prompt_of(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, **body: Any
) -> tuple[str, int]:
    """Does as tokens_of(), for a model with a token for each byte."""
    tokens, n = tokens_of(server, monkeypatch, path, **body)
    return bytes(tokens).decode(), n


def test_a_call_and_its_result_go_together(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest turn, then the oldest calls of the last turn; not the instructions."""
    call = {"function": {"name": "f", "arguments": {}}}
    called = [
        {"role": "assistant", "content": "I look", "tool_calls": [call]},
        {"role": "tool", "content": "a" * 30},
    ]
    messages = [{"role": "system", "content": "Be"}, *user("Hi"), *called, *user("Bye"), *called]
    n = len("uHi;") + len(f"aI look<tool_call>;t{'a' * 30};")
    found, _ = prompt_of(server, monkeypatch, "/api/chat", messages=[*messages, *called])
    assert found.startswith("sBe;uBye;aI look\x01")
    assert found.count("I look") == found.count("a" * 30) == 1
    assert n < N_CTX


@pytest.mark.parametrize(
    ("n_keep", "n_first"), [(None, 4), (0, 0), (10, 10), (-1, MOST - 1), (N_CTX, MOST - 1)]
)
def test_raw_prompts_keep_first_and_last_tokens(
    server: Server, monkeypatch: pytest.MonkeyPatch, n_keep: int | None, n_first: int
) -> None:
    options = {**OPTIONS, "num_keep": n_keep}
    found = prompt_of(server, monkeypatch, "/api/generate", prompt=LONG, raw=True, options=options)
    assert found == (LONG[:n_first] + LONG[n_first - MOST :], MOST)


@pytest.mark.parametrize(("n_keep", "n_first"), [(None, 5), (0, 1), (-1, MOST - 1)])
def test_the_token_that_begins_a_text_is_kept(
    tiny_opt: Path, monkeypatch: pytest.MonkeyPatch, n_keep: int | None, n_first: int
) -> None:
    text = "The old man went down to the sea. " * 20
    body = {"prompt": text, "raw": True, "options": {**OPTIONS, "num_keep": n_keep}}
    with (
        Generator(tiny_opt, n_ctx=N_CTX, threads=1) as generator,
        serving(generator, defaults=Defaults(truncation="auto")) as server,
    ):
        tokens = generator.tokenize(text)
        assert tokens[0] == generator.tokenizer.bos
        found = tokens_of(server, monkeypatch, "/api/generate", **body)
    assert found == (tokens[:n_first] + tokens[n_first - MOST :], MOST)


def test_what_fits_is_not_cut(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    text = LONG[: N_CTX - 2]
    found = prompt_of(server, monkeypatch, "/api/chat", messages=user(text))
    assert found == (f"u{text};", N_CTX)
    found = prompt_of(server, monkeypatch, "/api/generate", prompt=LONG[:N_CTX], raw=True)
    assert found == (LONG[:N_CTX], N_CTX)


def test_embeddings_keep_the_beginning(server: Server) -> None:
    cut, fits = (
        server.ask("/api/embeddings", {"prompt": text}).json() for text in (LONG, LONG[:N_CTX])
    )
    assert cut == fits


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": user(LONG), "truncate": False}),
        ("/api/generate", {"prompt": LONG, "truncate": False}),
        ("/api/generate", {"prompt": LONG, "raw": True, "truncate": False}),
        ("/api/embeddings", {"prompt": LONG, "truncate": False}),
        ("/api/generate", {"prompt": "Hi", "system": LONG}),
    ],
)
def test_refused(server: Server, path: str, body: dict[str, Any]) -> None:
    """Without truncate, and a system message that is too long."""
    answer = server.ask(path, body)
    assert answer.status == 400
    assert f"more than {N_CTX} tokens" in answer.json()["error"]


def test_max_prompt(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.app.state.service, "max_prompt", 40)
    found = prompt_of(server, monkeypatch, "/api/chat", messages=[*user(LONG), *user("Hi")])
    assert found == ("uHi;", 4)
    found = prompt_of(server, monkeypatch, "/v1/completions", prompt=LONG)
    assert found == (LONG[-30:], 30)
