"""Ollama's endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator
from support.dialects import (
    CALL,
    CHAT,
    FUNCTION,
    N_PROMPT,
    N_TOKENS,
    OUTPUT,
    POSTS,
    ask,
    talking_server,
)
from support.needs import packages
from support.scripted_chat import user
from support.serving import Server, serving
from support.tool_talk import N_CTX, THINKS, spell, talking


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with talking_server(tmp_path_factory.mktemp("talk")) as server:
        yield server


class TestOllama:
    def test_chat(self, server: Server) -> None:
        found = ask(server, "/api/chat", stream=False)
        message = found["message"]
        assert (message["content"], message["thinking"]) == ("Let me see.", "Hm.")
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": {"city": "Łódź"}}
        assert (found["done"], found["done_reason"]) == (True, "stop")
        assert (found["prompt_eval_count"], found["eval_count"]) == (N_PROMPT, N_TOKENS)

    def test_role_and_think_as_in_ollama(self, server: Server) -> None:
        messages = [{"role": "User", "content": "Hi"}]
        found = ask(server, "/api/chat", messages=messages, think="max", stream=False)
        assert found["message"]["content"] == "Let me see."

    def test_streams_by_default(self, server: Server) -> None:
        answer = server.ask("/api/chat", CHAT)
        assert answer.headers["Content-Type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in answer.body.splitlines()]
        assert "".join(line["message"]["content"] for line in lines) == "Let me see."
        assert [c for line in lines for c in line["message"].get("tool_calls", [])] != []
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]

    def test_generate(self, server: Server) -> None:
        found = ask(server, "/api/generate", stream=False)
        assert (found["response"], found["thinking"]) == (f"Let me see.\n{CALL}", "Hm.")
        cut = {"temperature": 0, "num_predict": 4}
        found = ask(server, "/api/generate", stream=False, options=cut)
        assert found["done_reason"] == "length"
        assert found["eval_count"] == 4

    def test_raw(self, server: Server) -> None:
        found = ask(server, "/api/generate", stream=False, raw=True, prompt="12345")
        assert found["response"] == OUTPUT.replace("<tool_call>", "").replace("</tool_call>", "")

    def test_system_without_a_template(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        body = {**POSTS["/api/generate"], "system": "Be brief", "stream": False}
        assert server.ask("/api/generate", body).status == 200
        answer = server.ask("/api/generate", {**body, "raw": True})
        assert answer.status == 400
        assert answer.json() == {
            "error": "system is given, but raw is set; expected its text in prompt"
        }
        monkeypatch.setattr(server.app.state.service, "template", None)
        answer = server.ask("/api/generate", body)
        assert answer.status == 400
        assert "but the model has no chat template" in answer.json()["error"]
        assert server.ask("/api/generate", {**body, "system": ""}).status == 200

    def test_models(self, server: Server) -> None:
        n_bytes = server.app.state.service.generator.path.stat().st_size
        for path in ("/api/tags", "/api/ps"):
            [model] = server.ask(path).json()["models"]
            assert (model["name"], model["size"]) == ("tiny", n_bytes)
        assert server.ask("/api/show", {"name": "tiny"}).json() == ask(server, "/api/show")
        found = ask(server, "/api/show", model="tiny:latest")
        assert found["capabilities"] == ["completion", "embedding", "tools", "thinking"]
        assert found["template"] == THINKS
        assert "version" in server.ask("/api/version").json()

    @pytest.mark.parametrize("backend", ["cpu (x86_64_v4, 2 threads)", "cuda (NVIDIA H100)"])
    def test_memory_of_the_gpu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
    ) -> None:
        """No request asks for the device, which may wait for the model."""
        with Generator(talking(tmp_path, {})) as generator:
            found = [replace(generator.stats(), backend=backend)]
            monkeypatch.setattr(generator, "stats", found.pop)
            with serving(generator) as server:
                for _ in range(2):
                    [model] = server.ask("/api/ps").json()["models"]
                    assert model["size_vram"] == (0 if backend.startswith("cpu") else model["size"])

    def test_properties_that_clients_read(self, server: Server) -> None:
        """The context is under the architecture's name; clients require a least version."""
        found = ask(server, "/api/show", system="", template="", options={})
        info = found["model_info"]
        assert info[f"{info['general.architecture']}.context_length"] == N_CTX
        assert (info["general.basename"], info["opt.embedding_length"]) == ("tiny", 1024)
        [listed] = server.ask("/api/tags").json()["models"]
        assert listed["details"]["family"] == found["details"]["family"] == "opt"
        assert listed["modified_at"] == found["modified_at"]
        [loaded] = server.ask("/api/ps").json()["models"]
        assert loaded["context_length"] == N_CTX
        assert datetime.fromisoformat(loaded["expires_at"].replace("Z", "+00:00")) > datetime.now(
            timezone.utc
        )
        version = server.ask("/api/version").json()["version"]
        assert [int(part) for part in version.split(".")] >= [0, 6, 4]

    @pytest.mark.parametrize(
        ("path", "change"),
        [
            ("/api/chat", {}),
            ("/api/generate", {}),
            ("/api/generate", {"raw": True, "prompt": "1" * N_PROMPT}),
        ],
    )
    def test_logprobs(self, server: Server, path: str, change: dict[str, Any]) -> None:
        assert "logprobs" not in ask(server, path, stream=False, logprobs=False, **change)
        change = {**change, "options": {"num_predict": 6, "temperature": 0}, "top_logprobs": 2}
        answer = server.ask(path, {**POSTS[path], **change})
        assert (answer.status, answer.json()["error"]) == (400, "top_logprobs needs logprobs")
        change["logprobs"] = True
        found = ask(server, path, stream=False, **change)
        assert len(found["logprobs"]) == found["eval_count"] == 6
        for one in found["logprobs"]:
            assert {*one} == {"token", "logprob", "bytes", "top_logprobs"}
            assert len(one["top_logprobs"]) == 2
            assert one["logprob"] == one["top_logprobs"][0]["logprob"] <= 0
        lines = server.ask(path, {**POSTS[path], **change}).body.splitlines()
        streamed = [one for line in lines for one in json.loads(line).get("logprobs", [])]
        assert streamed == found["logprobs"]

    def test_earlier_calls(self, tmp_path: Path) -> None:
        """Clients that share code with OpenAI's API send them so."""
        prompt = 'uHi;a<tool_call>{"name": "f", "arguments": {"x": 1}};t4;'
        called = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        messages = [
            *user("Hi"),
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "name": "f", "content": "4"},
        ]
        path = talking(tmp_path, {len(spell(prompt)): "Four."}, THINKS)
        with Generator(path) as generator, serving(generator) as server:
            found = ask(server, "/api/chat", messages=messages, tools=[], stream=False)
        assert found["message"]["content"] == "Four."

    def test_empty_fields_of_generate(self, server: Server) -> None:
        empty: dict[str, Any] = {"template": "", "context": [], "suffix": "", "images": []}
        found = ask(server, "/api/generate", stream=False, **empty)
        assert found["done_reason"] == "stop"
        answer = server.ask("/api/generate", {**POSTS["/api/generate"], "template": "x"})
        assert "not supported" in answer.json()["error"]

    def test_embed(self, server: Server) -> None:
        found = ask(server, "/api/embed", input=["Hi", "Ho"])
        assert [len(vector) for vector in found["embeddings"]] == [1024, 1024]
        old = ask(server, "/api/embeddings", model="tiny", options={"num_ctx": 64}, keep_alive=5)
        assert old["embedding"] == pytest.approx(found["embeddings"][0])
        assert ask(server, "/api/embeddings", prompt="") == {"embedding": []}

    @pytest.mark.parametrize("empty", [{"input": ""}, {"input": []}, {"input": None}, {}])
    def test_embed_without_input_loads_the_model(
        self, server: Server, empty: dict[str, Any]
    ) -> None:
        answer = server.ask("/api/embed", {"model": "tiny", **empty})
        assert (answer.status, answer.json()["embeddings"]) == (200, [])

    def test_embed_truncates(self, server: Server) -> None:
        """By default, to the context."""
        text = "".join(chr(97 + i * i % 26) for i in range(5 * N_CTX))
        found = ask(server, "/api/embed", input=[text, "Hi"])
        assert found["prompt_eval_count"] == N_CTX + 2
        assert found["total_duration"] > 0
        fits = ask(server, "/api/embed", input=[text[:N_CTX], "Hi"], truncate=False)
        assert fits["embeddings"] == found["embeddings"]
        answer = server.ask("/api/embed", {"input": [text, "Hi"], "truncate": False})
        assert answer.status == 400
        assert f"more than {N_CTX} tokens" in answer.json()["error"]

    def test_embed_dimensions(self, server: Server) -> None:
        """The first ones, scaled to length 1."""
        [whole] = ask(server, "/api/embed")["embeddings"]
        begin = np.array(whole[:5])
        [found] = ask(server, "/api/embed", dimensions=5)["embeddings"]
        assert found == pytest.approx(begin / np.linalg.norm(begin))
        for every in (0, 1024, 2000):
            assert ask(server, "/api/embed", dimensions=every)["embeddings"] == [whole]

    def test_errors_are_strings(self, server: Server) -> None:
        answer = server.ask("/api/chat", {**CHAT, "model": "other"})
        assert answer.status == 404
        assert answer.json() == {"error": "there is no model 'other', expected one of 'tiny'"}
        assert server.ask("/api/chat", {**CHAT, "format": "yaml"}).status == 400

    @pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
    def test_preload(self, server: Server, path: str) -> None:
        key, value = {
            "/api/generate": ("response", ""),
            "/api/chat": ("message", {"role": "assistant", "content": ""}),
        }[path]
        empty: dict[str, Any] = {"prompt": ""} if path == "/api/generate" else {"messages": []}
        for more, reason in (
            ({}, "load"),
            (empty, "load"),
            ({"keep_alive": "5m"}, "load"),
            ({"keep_alive": 0}, "unload"),
            ({"keep_alive": "0s"}, "unload"),
        ):
            answer = server.ask(path, {"model": "tiny", **more})
            assert answer.status == 200
            found = answer.json()
            assert (found["done"], found["done_reason"]) == (True, reason)
            assert (found["model"], found[key]) == ("tiny", value)
            [model] = server.ask("/api/ps").json()["models"]  # a single model stays loaded
            assert model["name"] == "tiny"
        assert ask(server, "/api/generate", stream=False)["done_reason"] == "stop"

    def test_random_seed_and_ignored_options(self, server: Server) -> None:
        options = {"temperature": 0, "seed": -1, "num_ctx": 64, "use_mlock": True, "numa": False}
        found = ask(server, "/api/chat", stream=False, truncate=True, shift=True, options=options)
        assert found["message"]["content"] == "Let me see."
        answer = server.ask("/api/chat", {**CHAT, "options": {"seed": 2**63}})
        assert answer.status == 400

    @pytest.mark.parametrize(
        ("path", "fields"),
        [
            ("/api/chat", {"max_output_tokens": 9, "temperature": 9, "tool_choice": "auto"}),
            ("/api/chat", {"options": {"rope_frequency_base": 1e6, "num_gqa": 8, "max_tokens": 1}}),
            ("/api/chat", {"tools": [{"function": {**FUNCTION, "x": 1}, "y": 2}]}),
            ("/api/chat", {"messages": [{**user("Hi")[0], "x": 1}]}),
            ("/api/generate", {"frequency": 1, "options": {"x": {}}}),
            ("/api/embed", {"x": 1, "options": {"x": 1}}),
            ("/api/embeddings", {"truncate": True}),
            ("/api/show", {"verbose": True}),
        ],
    )
    def test_unknown_fields_are_ignored(
        self, server: Server, path: str, fields: dict[str, Any]
    ) -> None:
        options = {"options": {"temperature": 0, **fields.get("options", {})}}
        more = {} if path == "/api/show" else {"stream": False}
        found = ask(server, path, **more, **{**fields, **options})
        expected = ask(server, path, **more)
        for key in ("message", "response", "embedding", "embeddings", "capabilities"):
            value = found.get(key)
            if key == "message" and value:
                value["tool_calls"][0]["id"] = expected[key]["tool_calls"][0]["id"]
            assert value == expected.get(key)

    @pytest.mark.parametrize(
        "fields",
        [
            {"options": {"top_k": "x"}},
            {"options": {"repeat_penalty": {}}},
            {"options": {"repeat_penalty": False}},
            {"tools": [{}]},
            {"messages": [{}]},
        ],
    )
    def test_known_fields_are_checked(self, server: Server, fields: dict[str, Any]) -> None:
        assert server.ask("/api/chat", {**CHAT, **fields}).status == 400

    @pytest.mark.parametrize("options", [{"repeat_penalty": 0.0}, {"top_k": 40.0}])
    def test_numbers_as_clients_write_them(self, server: Server, options: dict[str, float]) -> None:
        expected = ask(server, "/api/generate", stream=False)
        options = {"temperature": 0, **options}
        found = ask(server, "/api/generate", stream=False, options=options)
        assert found["response"] == expected["response"]

    @packages("ollama")
    def test_official_client(self, server: Server) -> None:
        import ollama

        with ollama.Client(host=server.url) as client:
            chunks = [*client.chat(**CHAT, stream=True)]
            assert client.list().models[0].model == "tiny"
        assert "".join(chunk.message.content or "" for chunk in chunks) == "Let me see."


def test_embeddings_of_long_texts(tiny_opt: Path) -> None:
    """Those of the first tokens that fit in both limits."""
    text = "The old man went down to the sea. " * 200
    with Generator(tiny_opt, n_ctx=40, threads=1) as generator:
        tokens = generator.tokenize(text)
        for most, n in ((None, 40), (30, 30), (90, 40)):
            with serving(generator, max_prompt=most) as server:
                answer = server.ask("/api/embed", {"input": text}).json()
            assert answer["prompt_eval_count"] == n
            [found] = answer["embeddings"]
            np.testing.assert_allclose(found, generator.embed(tokens[:n]), rtol=0, atol=1e-6)
