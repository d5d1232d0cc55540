"""Rejected requests, disconnecting clients, and late errors."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from h2o_cpp.generation.request import Constraint
from support.background import PATIENCE
from support.serving import FOREVER, Server, events, no_text_left, serving, wait_until

LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"
ENDLESS: dict[str, Any] = {"prompt": [5, 6], **FOREVER}
SHORT: dict[str, Any] = {"prompt": [7, 8, 9], "max_tokens": 5, "seed": 1, "ignore_eos": True}
PATHS = ["/v1/completions", "/v1/chat/completions"]


@contextmanager
def small_server(max_sequences: int = 1) -> Iterator[Server]:
    """A server with one sequence and a queue of two."""
    with (
        Generator(
            LLAMA, hh=12, n_batch=8, threads=1, seed=1, max_sequences=max_sequences
        ) as generator,
        serving(generator, max_queue=2, max_tokens=10**9, max_body_bytes=5000) as server,
    ):
        yield server


@pytest.fixture
def server() -> Iterator[Server]:
    with small_server() as server:
        yield server


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    """For requests that leave no state."""
    with small_server() as server:
        yield server


def active(server: Server) -> int:
    return server.engine.stats().n_active


def waiting(server: Server) -> int:
    return server.engine.stats().n_waiting


class TestLimits:
    def test_queue(self, server: Server) -> None:
        with server.begin(ENDLESS).sock:
            wait_until(lambda: active(server) == 1)
            others = [server.begin({**SHORT, "seed": i}) for i in range(2)]
            wait_until(lambda: waiting(server) == 2)
            answer = server.ask("/v1/completions", SHORT)
            assert answer.status == 429
            assert answer.headers["Retry-After"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert answer.json()["error"]["code"] == "queue_full"
            assert server.ask("/v1/completions", {**SHORT, "stream": True}).status == 429
            assert server.ask("/health").status == 200
        for other in others:  # the first client has disconnected and freed its sequence
            response = other.getresponse()
            assert response.status == 200
            assert json.loads(response.read())["choices"][0]["finish_reason"] == "length"
            other.close()

    def test_all_outputs_of_a_request_fit_in_the_queue(self, server: Server) -> None:
        with server.begin(ENDLESS).sock:
            wait_until(lambda: active(server) == 1)
            with server.begin(SHORT).sock:
                wait_until(lambda: waiting(server) == 1)
                assert server.ask("/v1/completions", {**SHORT, "n": 2}).status == 429
                wait_until(lambda: waiting(server) == 1)

    def test_body(self, server: Server) -> None:
        valid = {**SHORT, "user": "x" * 4000}
        assert server.ask("/v1/completions", valid).status == 200
        large = json.dumps({**SHORT, "user": "x" * 5000}).encode()
        answer = server.ask("/v1/completions", large)
        assert answer.status == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        chunks = iter([large[:3000], large[3000:]])
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", chunks, headers, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()

    def test_prompt(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        max_prompt = server.app.state.service.generator.n_ctx
        monkeypatch.setattr(server.app.state.service, "max_prompt", max_prompt)
        valid = {**SHORT, "max_tokens": 1, "prompt": [5] * max_prompt}
        assert server.ask("/v1/completions", valid).status == 200
        answer = server.ask("/v1/completions", {**valid, "prompt": [5] * (max_prompt + 1)})
        assert answer.status == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"

    def test_key(self) -> None:
        with (
            Generator(LLAMA, threads=1) as generator,
            serving(generator, api_key="sesame é") as server,
        ):
            key = "Bearer sesame é".encode().decode("latin-1")
            for path, body in [("/v1/models", None), *((path, SHORT) for path in PATHS)]:
                for headers in ({}, {"Authorization": "Bearer open"}, {"Authorization": key[:-1]}):
                    answer = server.ask(path, body, **headers)
                    assert answer.status == 401
                    assert answer.json()["error"]["code"] == "invalid_api_key"
            assert server.ask("/v1/completions", SHORT, Authorization=key).status == 200
            assert server.ask("/health").status == server.ask("/metrics").status == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"[" * 4000,
        b'{"prompt": ' + b"9" * 4900 + b"}",
        b'{"prompt": NaN, "messages": NaN}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"prompt": "a", "model": "\\ud800"}',
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "a", "stop": "\\ud800", "policy": "\\udfff"}',
        b'{"prompt": [-1]}',
        b'{"prompt": [1.5]}',
        b'{"prompt": [true]}',
        b'{"prompt": [[5], "a"]}',
        b'{"prompt": [9223372036854775808]}',
        b'{"prompt": "a", "seed": 18446744073709551616}',
        b'{"prompt": "a", "max_tokens": "5"}',
        b'{"prompt": "a", "hh": 1e300}',
        b'{"prompt": "a", "repeat_penalty": 1e-300}',
    ],
)
def test_malformed(shared_server: Server, path: str, body: bytes) -> None:
    answer = shared_server.ask(path, body)
    assert answer.status in (400, 404)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/..%2f..%2fapp.py", 404),
        ("GET", "/%00", 404),
    ],
)
def test_unknown_paths_and_methods(
    shared_server: Server, method: str, path: str, status: int
) -> None:
    answer = shared_server.ask(path, None if method == "GET" else {}, method=method)
    assert answer.status == status
    assert answer.json()["error"]["message"]


class TestDisconnects:
    """A client that disconnects frees its sequence or its place in the queue."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_while_generating(self, server: Server, stream: bool) -> None:
        connection = server.begin({**ENDLESS, "stream": stream})
        wait_until(lambda: active(server) == 1)
        if stream:
            response = connection.getresponse()
            assert response.readline().startswith(b"data: {")
            response.close()
        connection.close()
        wait_until(lambda: active(server) == 0)
        assert server.ask("/v1/completions", SHORT).status == 200

    @pytest.mark.parametrize("stream", [False, True])
    def test_while_queued(self, server: Server, stream: bool) -> None:
        first = server.begin(ENDLESS)
        wait_until(lambda: active(server) == 1)
        second = server.begin({**SHORT, "stream": stream, "n": 2})
        wait_until(lambda: waiting(server) == 2)
        second.close()
        wait_until(lambda: waiting(server) == 0)
        first.close()
        wait_until(lambda: active(server) == 0)

    def test_while_sending(self, server: Server) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{")
        assert server.ask("/v1/completions", SHORT).status == 200

    def test_outputs_are_freed(self, server: Server) -> None:
        for stream in (False, True) * 3:
            connection = server.begin({**ENDLESS, "stream": stream})
            wait_until(lambda: active(server) == 1)
            connection.close()
            wait_until(lambda: active(server) == 0)
        wait_until(no_text_left)


def submit_with(patch: pytest.MonkeyPatch, server: Server, constraint: Constraint) -> None:
    """Use `constraint` for all further requests to the Engine."""
    patch.setattr(server.engine, "submit", partial(server.engine.submit, constraint=constraint))


def failing_after(n_tokens: int, error: type[Exception]) -> Constraint:
    """A constraint that raises `error` after this many generated tokens."""
    n_prompt = len(SHORT["prompt"])

    def allow_all(tokens: Any, allowed: Any) -> None:
        if len(tokens) == n_prompt + n_tokens:
            raise error("a step that fails")
        allowed[:] = 0xFFFFFFFF

    return allow_all


class TestLateErrors:
    """Errors after the start of a stream are events of it."""

    def test_engine_closed_during_a_stream(self, server: Server) -> None:
        connection = server.begin({**ENDLESS, "stream": True})
        response = connection.getresponse()
        first = response.readline()
        server.engine.close()
        *_, last = events(first + response.read())
        assert last["error"]["code"] == "unavailable"
        connection.close()
        assert server.ask("/health").status == 503
        assert server.ask("/v1/completions", SHORT).status == 503

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(("error", "status"), [(MemoryError, 503), (TypeError, 500)])
    def test_failed_first_step(
        self,
        monkeypatch: pytest.MonkeyPatch,
        stream: bool,
        error: type[Exception],
        status: int,
    ) -> None:
        """The status reports the error, and other requests continue."""
        with small_server(max_sequences=2) as server, server.begin(ENDLESS).sock:
            wait_until(lambda: active(server) == 1)
            with monkeypatch.context() as patch:
                submit_with(patch, server, failing_after(0, error))
                answer = server.ask("/v1/completions", {**SHORT, "stream": stream})
            assert answer.status == status
            assert answer.json()["error"]["type"] == "server_error"
            assert active(server) == 1
            assert server.ask("/health").status == 200
            assert server.ask("/v1/completions", SHORT).status == 200

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (MemoryError, "there is not enough memory"),
            (TypeError, "internal error"),
        ],
    )
    def test_failed_step_during_a_stream(
        self,
        server: Server,
        monkeypatch: pytest.MonkeyPatch,
        error: type[Exception],
        message: str,
    ) -> None:
        with monkeypatch.context() as patch:
            submit_with(patch, server, failing_after(20, error))
            answer = server.ask("/v1/completions", {**SHORT, "max_tokens": 100, "stream": True})
            assert answer.status == 200
            assert events(answer.body)[-1]["error"]["message"] == message
        assert server.ask("/v1/completions", SHORT).status == 200


def test_unexpected_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise TypeError("unexpected")

    monkeypatch.setattr(server.app.state.service, "submit", fail)
    answer = server.ask("/v1/completions", SHORT)
    assert answer.status == 500
    assert answer.json()["error"]["message"] == "internal error"
    answer = server.ask("/api/generate", {"prompt": "a"})
    assert (answer.status, answer.json()) == (500, {"error": "internal error"})
    assert server.metric('h2o_responses_total{status="500"}') == 2


def test_metrics(server: Server) -> None:
    for n in (3, 20):
        answer = server.ask("/v1/completions", {**SHORT, "prompt": [5] * n, "max_tokens": 10})
        usage = answer.json()["usage"]
        assert (usage.pop("prompt_memory")["evicted_tokens"] > 0) == (n == 20)
        assert usage == {
            "prompt_tokens": n,
            "completion_tokens": 10,
            "total_tokens": n + 10,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
    server.ask("/v1/completions", {"prompt": [61]})
    assert server.metric("h2o_prompt_tokens_total") == 23
    assert server.metric("h2o_generated_tokens_total") == 20
    # 12 and 29 tokens have been processed, and 12 are kept.
    assert server.metric("h2o_evicted_tokens_total") == 17
    assert server.metric("h2o_requests_waiting") == server.metric("h2o_sequences_active") == 0
    assert server.metric("h2o_sequences") == 1
    assert 0 < server.metric("h2o_cache_bytes") < server.metric("h2o_full_cache_bytes")
    assert server.metric('h2o_responses_total{status="400"}') == 1
    with server.begin(ENDLESS).sock:
        wait_until(lambda: server.metric("h2o_sequences_active") == 1)
        with server.begin(SHORT).sock:
            wait_until(lambda: server.metric("h2o_requests_waiting") == 1)
    wait_until(lambda: server.metric('h2o_responses_total{status="499"}') == 2)


def test_cache_of_a_model_is_per_sequence(llama: Path) -> None:
    """Also if the caches of more sequences are allocated when they are needed."""
    with Generator(llama, hh=12, threads=1, max_sequences=1) as one:
        expected = one.stats().cache_bytes
    with (
        Generator(llama, hh=12, threads=1) as generator,
        serving(generator, max_tokens=10**9) as server,
    ):
        assert generator.max_sequences > generator.stats().n_sequences == 1
        (model,) = json.loads(server.ask("/v1/models").body)["data"]
        assert model["h2o"]["cache_bytes"] == expected
        assert server.metric("h2o_cache_bytes") == expected
        with server.begin(ENDLESS).sock, server.begin(ENDLESS).sock:
            wait_until(lambda: server.metric("h2o_cache_bytes") == 2 * expected)
