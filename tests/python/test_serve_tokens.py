"""Embeddings, tokens and properties over HTTP."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator
from support.needs import packages
from support.scripted_chat import PLAIN, user
from support.serving import Server, serving, wait_until

TEXT = "The old man went down to the sea."


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Iterator[Generator]:
    with Generator(tiny_opt, n_ctx=64, max_sequences=2, threads=1) as generator:
        yield generator


@pytest.fixture(scope="module")
def server(generator: Generator) -> Iterator[Server]:
    with serving(generator, template=PLAIN, max_queue=3) as server:
        yield server


@pytest.mark.parametrize("path", ["/", "/health", "/api/tags", "/v1/models", "/models"])
def test_head_is_get_without_a_body(server: Server, path: str) -> None:
    head, get = server.ask(path, method="HEAD"), server.ask(path)
    assert (head.status, head.body) == (200, b"")
    for name in ("Content-Length", "Content-Type"):
        assert head.headers[name] == get.headers[name]


def test_slash_at_the_end(server: Server) -> None:
    """It has no effect on the APIs; the links of /docs are relative to its path without one."""
    for path in ("/v1/models", "/models", "/v1/models/tiny", "/api/tags", "/api/version"):
        assert server.ask(f"{path}/").json() == server.ask(path).json()
    answer = server.ask("/v1/embeddings/", {"input": TEXT})
    assert (answer.status, answer.json()) == (
        200,
        server.ask("/v1/embeddings", {"input": TEXT}).json(),
    )
    for path, body in (
        ("/tokenize", {"content": TEXT}),
        ("/detokenize", {"tokens": [5]}),
        ("/apply-template", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/props", None),
        ("/health", None),
    ):
        answer = server.ask(f"{path}/", body)
        assert (answer.status, answer.json()) == (200, server.ask(path, body).json())
    assert [server.ask(path).status for path in ("/static/", "/v1/", "/api/")] == [404] * 3
    answer = server.ask("/docs/")
    assert (answer.status, answer.headers["Location"]) == (307, f"{server.url}/docs")


def test_retrieve_model(server: Server) -> None:
    [model] = server.ask("/v1/models").json()["data"]
    assert server.ask("/v1/models/tiny").json() == model
    answer = server.ask("/v1/models/org/other")
    assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")


class TestEmbeddings:
    def ask(self, server: Server, **body: Any) -> Any:
        answer = server.ask("/v1/embeddings", body)
        assert answer.status == 200, answer.body
        return answer.json()

    def test_equal_those_of_the_generator(self, server: Server, generator: Generator) -> None:
        texts = [TEXT, "A king", "A boy"]
        for pooling in ("mean", "last"):
            found = self.ask(server, input=texts, pooling=pooling)
            vectors = np.array([entry["embedding"] for entry in found["data"]], np.float32)
            expected = generator.embed(texts, pooling=pooling)
            np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-6)
        assert [entry["index"] for entry in found["data"]] == [0, 1, 2]
        n = sum(len(generator.tokenize(text)) for text in texts)
        assert found["usage"] == {"prompt_tokens": n, "total_tokens": n}

    def test_token_input_and_base64_output(self, server: Server, generator: Generator) -> None:
        tokens = generator.tokenize(TEXT)
        [entry] = self.ask(server, input=tokens, encoding_format="base64", dimensions=192)["data"]
        vector = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
        np.testing.assert_allclose(vector, generator.embed(TEXT), rtol=0, atol=1e-6)

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"input": ""}, "is empty"),
            ({"input": ["a", ""]}, r"input[1] is empty"),
            ({"input": []}, "input"),
            ({"input": "the king " * 100}, "more than 64 tokens"),
            ({"input": [[5], [6], [7], [10**6]]}, "vocabulary"),
            ({"input": "a", "dimensions": 5}, "dimensions must be 192"),
            ({"input": [10**6]}, "vocabulary"),
            ({"input": "a", "model": "other"}, "no model"),
        ],
    )
    def test_invalid_requests(self, server: Server, body: Any, message: str) -> None:
        answer = server.ask("/v1/embeddings", body)
        assert answer.status in (400, 404)
        assert message in answer.json()["error"]["message"]
        assert server.metric("h2o_sequences_active") == 0

    def test_more_texts_than_the_queue_takes(self, server: Server, generator: Generator) -> None:
        texts = [f"{TEXT} {i}"[: 3 + i % 7] for i in range(40)]
        found = self.ask(server, input=texts)
        assert [entry["index"] for entry in found["data"]] == list(range(40))
        vectors = np.array([entry["embedding"] for entry in found["data"]], np.float32)
        np.testing.assert_allclose(vectors, generator.embed(texts), rtol=0, atol=1e-6)
        n = sum(len(generator.tokenize(text)) for text in texts)
        assert found["usage"]["prompt_tokens"] == n

    def test_a_client_that_leaves_frees_all_sequences(self, server: Server) -> None:
        def n_submitted() -> int:
            return int(server.metric("h2o_prompt_tokens_total"))

        left = 'h2o_responses_total{status="499"}'
        before, n_left = n_submitted(), server.metric(left)
        with server.begin({"input": [[5] * 60] * 4000}, "/v1/embeddings").sock:
            wait_until(lambda: n_submitted() > before)
        wait_until(lambda: server.metric(left) > n_left)
        wait_until(lambda: server.metric("h2o_sequences_active") == 0)
        wait_until(lambda: server.metric("h2o_requests_waiting") == 0)
        assert n_submitted() < before + 60 * 4000

    def test_a_text_that_is_submitted_while_the_client_leaves(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from h2o_cpp.serve.errors import ApiError

        engine, submit = server.engine, server.engine.submit_async
        outputs = server.app.state.service.embed([[5]] * 9, "mean")

        async def leave_and_submit(*args: Any, **options: Any) -> Any:
            while any(output.generation is None for output in outputs.all):
                await asyncio.sleep(0)
            outputs.close()
            return await submit(*args, **options)

        async def read() -> None:
            async for _ in outputs.pieces():
                pass

        monkeypatch.setattr(engine, "submit_async", leave_and_submit)
        with pytest.raises(ApiError, match="not taking requests"):
            asyncio.run(read())

    @packages("openai")
    def test_openai_client(self, server: Server, generator: Generator) -> None:
        import openai

        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            [entry] = client.embeddings.create(model="tiny", input=TEXT).data
        np.testing.assert_allclose(entry.embedding, generator.embed(TEXT), rtol=0, atol=1e-6)


class TestTokens:
    def test_tokenize_and_detokenize(self, server: Server, generator: Generator) -> None:
        tokens = server.ask("/tokenize", {"content": TEXT}).json()["tokens"]
        assert tokens == generator.tokenize(TEXT, add_special=False)
        assert server.ask("/detokenize", {"tokens": tokens}).json() == {"content": TEXT}
        body = {"content": TEXT, "with_pieces": True}
        pieces = server.ask("/tokenize", body).json()["tokens"]
        assert "".join(piece["piece"] for piece in pieces) == TEXT

    def test_special_tokens(self, server: Server, generator: Generator) -> None:
        content = {"content": "a</s>"}
        with_special = server.ask("/tokenize", {**content, "add_special": True}).json()["tokens"]
        assert with_special == generator.tokenize("a</s>", parse_special=True)
        text = server.ask("/detokenize", {"tokens": with_special}).json()["content"]
        assert text == "</s>a</s>"  # as in llama.cpp; OPT's texts begin with </s>
        as_text = server.ask("/tokenize", {**content, "parse_special": False}).json()["tokens"]
        assert as_text == generator.tokenize("a</s>", add_special=False)

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/tokenize", {"content": "the king " * 100}),
            ("/tokenize", {"content": "\ud800"}),
            ("/tokenize", {"content": 1}),
            ("/tokenize", {}),
            ("/detokenize", {"tokens": [10**6]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/apply-template", {"messages": []}),
            ("/apply-template", {"messages": user("\ud800")}),
        ],
    )
    def test_invalid_requests(self, server: Server, path: str, body: Any) -> None:
        assert server.ask(path, body).status == 400

    def test_template(self, server: Server) -> None:
        answer = server.ask("/apply-template", {"messages": user("Hi</s>")})
        assert answer.json() == {"prompt": "user: Hi</s>\nassistant:"}


def test_properties(server: Server, tiny_opt: Path) -> None:
    found = server.ask("/props").json()
    assert found["model_path"] == tiny_opt.name
    assert found["total_slots"] == 2
    settings = found["default_generation_settings"]
    assert settings["n_ctx"] == 64
    assert (settings["params"]["top_k"], settings["params"]["seed"]) == (40, -1)
    assert (found["chat_template"], found["chat_template_tool_use"]) == (PLAIN, None)
    assert server.ask("/props?model=other").status == 404


def test_slots(server: Server) -> None:
    idle = {"n_ctx": 64, "is_processing": False}
    assert server.ask("/slots").json() == [{"id": 0, **idle}, {"id": 1, **idle}]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply-template", "/v1/embeddings"])
def test_body_limit_and_api_key(tiny_opt: Path, path: str) -> None:
    with (
        Generator(tiny_opt, n_ctx=64, threads=1) as generator,
        serving(generator, max_body_bytes=100, api_key="sesame") as server,
    ):
        assert server.ask(path, b"x").status == 401
        key = {"Authorization": "Bearer sesame"}
        assert server.ask(path, b"x" * 101, **key).status == 413
        assert server.ask(path, b"x", **key).status == 400
        for get in ("/slots", "/props", "/v1/models", "/v1/models/"):
            assert server.ask(get).status == 401
