"""Handling of requests before generation: order of checks, limits and concurrency."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")

from h2o_cpp import Generator
from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.openai_requests import ChatRequest, CompletionRequest
from h2o_cpp.serve.schema import parse
from support.background import PATIENCE, Background
from support.needs import packages
from support.serving import Server, serving, wait_until

SHORT: dict[str, Any] = {"prompt": "The", "max_tokens": 3, "seed": 1, "ignore_eos": True}
KEY = "sesame"
LARGE = 150_000  # bytes of a body that counts as large
PATH = "/v1/completions"


@pytest.fixture
def server(tiny_opt: Path) -> Iterator[Server]:
    with (
        Generator(tiny_opt, n_ctx=2048, max_sequences=4, threads=1) as generator,
        serving(generator, max_body_bytes=2 * LARGE, max_bodies_bytes=3 * LARGE) as server,
    ):
        yield server


def send(server: Server, head: str, body: bytes = b"") -> socket.socket:
    """Send the start of a request; returns the open socket."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    sock.sendall(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode() + body)
    return sock


def read_response(sock: socket.socket) -> tuple[http.client.HTTPResponse, Any]:
    """The response and its JSON; reads until the server closes the connection."""
    response = http.client.HTTPResponse(sock)
    response.begin()
    return response, json.loads(response.read())


class TestApiKeyIsCheckedFirst:
    @pytest.fixture
    def server(self, tiny_opt: Path) -> Iterator[Server]:
        with (
            Generator(tiny_opt, threads=1) as generator,
            serving(generator, api_key=KEY) as server,
        ):
            yield server

    @pytest.mark.parametrize("length", ["Content-Length: 4000000", "Transfer-Encoding: chunked"])
    def test_before_the_body_arrives(self, server: Server, length: str) -> None:
        """A client without the key gets its response although it never sends the body."""
        with send(server, f"{length}\r\n") as sock:
            response, body = read_response(sock)
            assert response.status == 401
            assert body["error"]["code"] == "invalid_api_key"
            assert response.headers["Connection"] == "close"
            assert sock.recv(1) == b""  # closed
        assert server.metric("h2o_body_bytes") == 0

    def test_before_the_body_is_parsed(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parsed: list[bytes] = []
        monkeypatch.setattr("h2o_cpp.serve.endpoint.parse", lambda _, body: parsed.append(body))
        body = b'{"a":[' + b",".join([b"{}"] * 100_000) + b"]}"
        assert server.ask(PATH, body).status == 401
        assert parsed == []

    @pytest.mark.parametrize("path", ["/v1/models", "/v1", "/v1/nothing", "/V1/completions", "/x"])
    def test_for_every_path_that_is_not_public(self, server: Server, path: str) -> None:
        assert server.ask(path).status == 401
        assert server.ask(path, Authorization=f"bearer {KEY}").status in (200, 404)


class TestBytesInFlight:
    def test_max_bodies_bytes(self, server: Server) -> None:
        """Two bodies whose last byte is missing are held; a third exceeds the limit."""
        body = json.dumps({**SHORT, "user": "x" * LARGE}).encode()
        head = f"Content-Length: {len(body)}\r\n"
        with send(server, head, body[:-1]) as first, send(server, head, body[:-1]) as second:
            wait_until(lambda: server.metric("h2o_body_bytes") == 2 * len(body) - 2)
            rejected = server.ask(PATH, body)
            assert rejected.status == 503
            assert rejected.json()["error"]["code"] == "too_many_bytes"
            assert rejected.headers["Retry-After"] == "1"
            assert server.ask(PATH, SHORT).status == 200  # a small one still fits
            for sock in (first, second):
                sock.sendall(body[-1:])
                assert read_response(sock)[0].status == 200
        wait_until(lambda: server.metric("h2o_body_bytes") == 0)
        assert server.ask(PATH, body).status == 200

    def test_bytes_of_disconnected_clients_are_freed(self, server: Server) -> None:
        with send(server, "Content-Length: 100000\r\n", b" " * 90_000):
            wait_until(lambda: server.metric("h2o_body_bytes") == 90_000)
        wait_until(lambda: server.metric("h2o_body_bytes") == 0)

    def test_chunked_body_is_rejected_once_too_large(self, server: Server) -> None:
        chunk = b"%x\r\n" % 100_000 + b" " * 100_000 + b"\r\n"
        with send(server, "Transfer-Encoding: chunked\r\n", 4 * chunk) as sock:
            response, body = read_response(sock)
            assert response.status == 413
            assert body["error"]["code"] == "body_too_large"

    def test_body_timeout(self, tiny_opt: Path) -> None:
        with (
            Generator(tiny_opt, threads=1) as generator,
            serving(generator, body_timeout=1) as server,
            send(server, "Content-Length: 50\r\n", b'{"prompt"') as sock,
        ):
            response, body = read_response(sock)
            assert response.status == 408
            assert body["error"]["message"] == "the body did not arrive within 1 s"
            assert sock.recv(1) == b""


def test_content_length_with_transfer_encoding(server: Server) -> None:
    """A proxy in front of the server may believe the other one."""
    head = "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"
    with send(server, head, b"0\r\n\r\n") as sock:
        response, body = read_response(sock)
        assert response.status == 400
        assert "Transfer-Encoding" in body["error"]["message"]
        assert sock.recv(1) == b""


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_content_type_is_ignored(server: Server, content_type: str | None) -> None:
    """`curl -d` sends another one."""
    body = json.dumps(SHORT).encode()
    head = f"Content-Length: {len(body)}\r\n"
    head += "" if content_type is None else f"Content-Type: {content_type}\r\n"
    with send(server, head, body) as sock:
        response, answer = read_response(sock)
    assert response.status == 200
    assert answer["usage"]["completion_tokens"] == 3


def many(item: bytes) -> bytes:
    """A JSON list of the item, 4 MB long."""
    return b"[" + b",".join([item] * (4_000_000 // (len(item) + 1))) + b"]"


class TestParsing:
    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (b'{"a":' + many(b"{}") + b"}", "arrays, objects and keys"),
            (b'{"a":' + many(b"[1]") + b"}", "arrays, objects and keys"),
            (b'{"prompt":' + many(b"1") + b"}", "values"),
            (b'{"prompt":' + many(b'""') + b"}", "values"),
            (b"{" + b",".join(b'"%x":0' % i for i in range(400_000)) + b"}", "keys"),
            (b"[" * 4_000_000, "arrays"),
            (b'"' * 4_000_000, "Invalid JSON"),
            (rb'"\"' * 1_000_000, "Invalid JSON"),
        ],
    )
    def test_memory_is_proportional_to_the_bytes(self, body: bytes, message: str) -> None:
        """A few times the size of the body; its values as objects would take 25 times."""
        tracemalloc.start()
        try:
            with pytest.raises(ApiError, match=message):
                parse(CompletionRequest, body)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 5 * len(body)

    @pytest.mark.parametrize(
        ("model", "body"),
        [
            (CompletionRequest, {f"x{i}": 0 for i in range(50_000)}),
            (CompletionRequest, {"prompt": [{}] * 50_000}),
            (CompletionRequest, {"prompt": [[{}]] * 25_000}),
            (CompletionRequest, {"prompt": "a", "metadata": {f"x{i}": "" for i in range(50_000)}}),
            (CompletionRequest, {"prompt": "a", "stop": [0] * 200_000}),
            (ChatRequest, {"messages": [{}] * 50_000}),
            (ChatRequest, {"messages": [{"role": "user", "content": [0] * 200_000}]}),
        ],
    )
    def test_one_of_many_errors_is_reported(self, model: Any, body: Any) -> None:
        tracemalloc.start()
        try:
            with pytest.raises(ApiError):
                parse(model, json.dumps(body).encode())
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 60e6

    @pytest.mark.parametrize("text", ["{[:,", '\\"{[:,', "\\\\", '"', '\\\\"{'])
    def test_brackets_in_strings_do_not_count(self, text: str) -> None:
        body = json.dumps({"prompt": text * 80_000, "user": text})
        assert parse(CompletionRequest, body.encode()).prompt == text * 80_000

    def test_prompt_of_131072_tokens(self) -> None:
        tokens = [*range(131_072)]
        body = json.dumps({"prompt": tokens}).encode()
        assert parse(CompletionRequest, body).prompt == tokens


class Gate:
    """Wraps a function; calls with long texts wait until it is opened."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.open = threading.Event()
        self.n_waiting = 0

    def __call__(self, text: Any, **options: Any) -> Any:
        if len(text) > LARGE // 2:
            self.n_waiting += 1
            assert self.open.wait(PATIENCE), "the gate was not opened"
            self.n_waiting -= 1
        return self._function(text, **options)


class TestTokenization:
    def test_large_prompts_one_at_a_time(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Other requests are answered meanwhile; the large prompts have too many tokens."""
        tokenizer = server.app.state.service.generator.tokenizer
        gate = Gate(tokenizer.encode)
        monkeypatch.setattr(tokenizer, "encode", gate)
        body = {**SHORT, "prompt": "x" * LARGE}
        n_bytes = len(json.dumps(body))
        with ExitStack() as cleanup:
            cleanup.callback(gate.open.set)
            large = [Background(lambda: server.ask(PATH, body)) for _ in range(2)]
            wait_until(lambda: server.metric("h2o_body_bytes") == 2 * n_bytes)
            wait_until(lambda: gate.n_waiting > 0)
            medium = {**SHORT, "user": "x" * 20_000}
            for second in [SHORT, medium] * 3:
                assert server.ask(PATH, second).status == 200
            assert gate.n_waiting == 1
        for task in large:
            answer = task.result()
            assert answer.status == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"

    @packages("llguidance")
    def test_grammars_are_compiled_in_a_thread(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        submit, threads = server.engine.submit, []

        def submit_and_note(*args: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name.partition("_")[0])
            return submit(*args, **options)

        monkeypatch.setattr(server.engine, "submit", submit_and_note)
        assert server.ask(PATH, SHORT).status == 200
        constrained = {"prompt": "The", "guided_choice": ["a", "b"]}
        assert server.ask(PATH, constrained).status == 200
        assert threads[1] == "h2o-grammars" != threads[0]

    def test_prompt_limit_counts_tokens(self, server: Server) -> None:
        """A prompt of more bytes than the limit, but not more tokens, is accepted."""
        n_bytes = 3000
        prompt = "ship " * (n_bytes // 5)
        n = len(server.app.state.service.generator.tokenize(prompt))
        for max_prompt, status in ((n, 200), (n - 1, 400)):
            server.app.state.service.max_prompt = max_prompt
            answer = server.ask(PATH, {**SHORT, "prompt": prompt})
            assert answer.status == status
        assert answer.json()["error"] == {
            "message": f"the prompt has more than {n - 1} tokens, the server's limit",
            "type": "invalid_request_error",
            "param": None,
            "code": "context_length_exceeded",
        }


def test_compressed_bodies_are_refused(server: Server) -> None:
    body = json.dumps(SHORT).encode()
    answer = server.ask(PATH, gzip.compress(body), **{"Content-Encoding": "gzip"})
    assert answer.status == 415
    message = answer.json()["error"]["message"]
    assert message == "the body's Content-Encoding is 'gzip', expected none"
    assert server.ask(PATH, body, **{"Content-Encoding": "identity"}).status == 200


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content | truncate(-5) }}", "expected length"),
        ("{{ messages[0].content * 10 ** 9 }}", "takes more than"),
        ("{{ raise_exception('No.') }}", "No."),
    ],
)
def test_failing_templates(tiny_opt: Path, template: str, message: str) -> None:
    chat = {"messages": [{"role": "user", "content": "A ship?"}], "max_tokens": 2}
    with (
        Generator(tiny_opt, threads=1) as generator,
        serving(generator, template=template) as server,
    ):
        answer = server.ask("/v1/chat/completions", chat)
        assert answer.status == 400
        assert message in answer.json()["error"]["message"]
        assert server.ask(PATH, SHORT).status == 200
