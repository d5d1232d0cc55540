"""Protected prompts of requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")

from h2o_cpp import Generator
from h2o_cpp.serve.options import Defaults
from support.server_process import start_server
from support.serving import Server, serving

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"
SYSTEM = "Talk like the sea does."
MESSAGES = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Who are you, and where is the boat of the old man?"},
]
OPTIONS = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
USER = MESSAGES[1:]
GREEDY = {"temperature": 0, "num_predict": 60}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"system": SYSTEM, "messages": USER, "max_tokens": 60, "temperature": 0},
    "/v1/responses": {
        "instructions": SYSTEM, "input": USER, "max_output_tokens": 60, "temperature": 0,
    },
    "/api/chat": {"messages": MESSAGES, "options": GREEDY, "stream": False},
    "/api/generate": {
        "system": SYSTEM, "prompt": USER[0]["content"], "options": GREEDY, "stream": False,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Iterator[Generator]:
    with Generator(tiny_opt, hh=40, n_ctx=200, n_batch=16, threads=1, max_sequences=1) as found:
        yield found


@pytest.fixture(scope="module")
def server(generator: Generator) -> Iterator[Server]:
    with serving(generator, template=TEMPLATE) as server:
        yield server


def kept_by_all(generator: Generator) -> set[int]:
    """Positions that every KV head of every layer keeps."""
    stats = generator.stats(layers=True)
    return set.intersection(
        *(
            set(generator.kept(layer, head)[0].tolist())
            for layer in range(stats.n_layers)
            for head in range(len(stats.layers[layer].heads))
        )
    )


def test_system_prompt_of_a_conversation(server: Server, generator: Generator) -> None:
    n_system = len(generator.tokenize(f"[system] {SYSTEM}\n[user] ")) - 1
    body = {"messages": MESSAGES, **OPTIONS}
    assert server.ask("/v1/chat/completions", body).status == 200
    assert not {*range(n_system)} <= kept_by_all(generator)
    for protect in ("system", n_system, [n_system, 0]):
        answer = server.ask("/v1/chat/completions", {**body, "protect": protect})
        assert answer.status == 200, answer.body
        assert {*range(n_system)} <= kept_by_all(generator)


@pytest.mark.parametrize("path", BODIES)
def test_system_prompt_in_other_apis(server: Server, generator: Generator, path: str) -> None:
    for protect, holds in ((None, False), ("system", True)):
        answer = server.ask(path, {**BODIES[path], "protect": protect})
        assert answer.status == 200, answer.body
        n_system = len(generator.tokenize(f"[system] {SYSTEM}\n[user] ")) - 1
        assert ({*range(n_system)} <= kept_by_all(generator)) == holds


def test_prompt_of_a_text(server: Server, generator: Generator) -> None:
    prompt = "The old man went down to the sea"
    body = {"prompt": prompt, "protect": "prompt", **OPTIONS}
    assert server.ask("/v1/completions", body).status == 200
    assert {*range(len(generator.tokenize(prompt)))} <= kept_by_all(generator)


@pytest.mark.parametrize(
    ("path", "protect", "message"),
    [
        ("/v1/completions", "system", "protect='system', expected 'prompt'"),
        (
            "/v1/completions",
            40,
            "protect keeps 40 tokens of the prompt, expected fewer than the 40",
        ),
        ("/v1/completions", -1, "protect=-1"),
        ("/v1/chat/completions", "all", "protect"),
    ],
)
def test_errors(server: Server, path: str, protect: Any, message: str) -> None:
    given: Any = {"messages": MESSAGES} if "chat" in path else {"prompt": [7] * 50}
    answer = server.ask(path, {**given, **OPTIONS, "protect": protect})
    assert answer.status == 400
    assert message in answer.json()["error"]["message"]


def test_a_server_protects_system_prompts(tiny_opt: Path) -> None:
    options: dict[str, Any] = {"hh": 40, "n_ctx": 200, "n_batch": 16, "max_sequences": 1}
    with Generator(tiny_opt, threads=1, **options) as generator:
        _check_protected(generator)


def _check_protected(generator: Generator) -> None:
    n_system = len(generator.tokenize(f"[system] {SYSTEM}\n[user] ")) - 1
    body = {"messages": MESSAGES, **OPTIONS}
    with serving(generator, template=TEMPLATE, defaults=Defaults(protect="system")) as server:
        assert server.ask("/v1/chat/completions", body).status == 200
        assert {*range(n_system)} <= kept_by_all(generator)
        assert server.ask("/v1/chat/completions", {**body, "protect": 0}).status == 200
        assert not {*range(n_system)} <= kept_by_all(generator)


@pytest.mark.parametrize(("hh", "holds"), [(40, True), (16, False)])
def test_a_server_protects_short_system_prompts(tiny_opt: Path, hh: int, holds: bool) -> None:
    """The budget is that of the request."""
    options: dict[str, Any] = {"hh": 40, "n_ctx": 200, "n_batch": 16, "max_sequences": 1}
    defaults = Defaults(protect="auto")
    body = {"messages": MESSAGES, **OPTIONS, "hh": hh}
    with (
        Generator(tiny_opt, threads=1, **options) as generator,
        serving(generator, template=TEMPLATE, defaults=defaults) as server,
    ):
        n_system = len(generator.tokenize(f"[system] {SYSTEM}\n[user] ")) - 1
        assert 8 < n_system <= 20
        assert server.ask("/v1/chat/completions", body).status == 200
        assert ({*range(n_system)} <= kept_by_all(generator)) == holds


def test_a_server_has_a_policy_for_budgets_of_requests(tiny_opt: Path) -> None:
    options: dict[str, Any] = {"hh": 40, "n_ctx": 200, "n_batch": 16, "max_sequences": 1}
    body = {"prompt": [*range(5, 60)], "hh": 20, **OPTIONS}
    with (
        Generator(tiny_opt, threads=1, policy="contribution", **options) as generator,
        serving(generator, defaults=Defaults(policy="contribution")) as server,
    ):
        texts = [
            server.ask("/v1/completions", {**body, **more}).json()["choices"][0]["text"]
            for more in ({}, {"policy": "contribution"}, {"policy": "h2o"})
        ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("listed", [False, True], ids=["model", "list"])
def test_budgets_of_requests_have_the_policy_of_serve(
    tmp_path: Path, tiny_opt: Path, listed: bool
) -> None:
    """Not the default one, whose scores this cache does not have."""
    options = {"policy": "h2o", "hh": 40, "n_ctx": 200, "n_batch": 16, "threads": 1}
    words = [str(tiny_opt)]
    if listed:
        models = tmp_path / "models.toml"
        lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
        models.write_text("\n".join(["[tiny-opt]", f'model = "{tiny_opt}"', *lines]))
        words = ["--models", str(models)]
    else:
        words += [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    body = {"model": "tiny-opt", "prompt": [*range(5, 60)], "hh": 20, **OPTIONS}
    process, port = start_server([sys.executable, "-m", "h2o_cpp", "serve", *words, "--port", "0"])
    try:
        texts = [
            Server(None, port).ask("/v1/completions", body | more).json()["choices"][0]["text"]
            for more in ({}, {"policy": "h2o"}, {"policy": "window"})
        ]
    finally:
        process.kill()
        process.wait()
    assert texts[0] == texts[1] != texts[2]


def test_a_system_prompt_after_100_000_tokens() -> None:
    """The model was trained on 40."""
    with Generator(LLAMA, hh=24, policy="window", n_batch=16, threads=1) as generator:
        system = generator.tokenize("Be brief.")
        prompt = [*system, *(5 + i * i % 50 for i in range(100_000))]
        for protect, holds in ((len(system), True), (0, False)):
            stream = generator.stream(prompt, protect=protect, max_tokens=2, ignore_eos=True)
            list(stream)
            assert generator.stats().tokens_seen > 100_000
            assert ({*range(len(system))} <= kept_by_all(generator)) == holds
