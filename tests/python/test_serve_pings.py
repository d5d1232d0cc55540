"""Streams that wait for a sequence are not silent, in every API and behind nginx."""

from __future__ import annotations

import gc
import http.client
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")

from h2o_cpp import Generator
from h2o_cpp.serve.generation_response import GenerationResponse, OutputsResponse, are_pings
from support.background import PATIENCE, Background
from support.needs import needs, packages
from support.scripted_chat import PLAIN, user
from support.serving import FOREVER, Server, serving, wait_until

LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
# With nginx's defaults; it buffers answers and speaks HTTP/1.0 to the server.
CONF = """daemon off; master_process off; pid {folder}/pid; error_log {folder}/log;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
  uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  server {{ listen unix:{folder}/socket; location / {{ proxy_pass {url}; }} }}
}}"""

CHAT: dict[str, Any] = {"messages": user("Hi"), "max_tokens": 5, "stream": True, "seed": 1}
LIMIT = {"num_predict": 5, "seed": 1}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [7, 8, 9], "max_tokens": 5, "stream": True},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 5, "stream": True, "temperature": 0},
    "/v1/messages": {**CHAT, "temperature": 0, "seed": None},
    "/api/chat": {"messages": user("Hi"), "options": LIMIT},
    "/api/generate": {"prompt": "Hi", "options": LIMIT},
}
ENDS = {
    "/v1/completions": "data: [DONE]",
    "/v1/chat/completions": "data: [DONE]",
    "/v1/responses": '"response.incomplete"',
    "/v1/messages": '"message_stop"',
    "/api/chat": '"done":true',
    "/api/generate": '"done":true',
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with one sequence, whose pings come soon."""
    monkeypatch.setattr("h2o_cpp.serve.generation_response._PING_SECONDS", 0.05)
    with (
        Generator(LLAMA, hh=12, n_batch=8, threads=1, max_sequences=1) as generator,
        serving(generator, template=PLAIN, max_tokens=10**9) as server,
    ):
        yield server


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """While the only sequence is in use."""
    connection = server.begin({"prompt": [5, 6], **FOREVER})
    try:
        wait_until(lambda: server.engine.stats().n_active == 1)
        yield
    finally:
        connection.close()


def is_ping(path: str, line: str) -> bool:
    if path.startswith("/api/"):
        answer = json.loads(line)
        piece = answer["message"]["content"] if "message" in answer else answer["response"]
        return piece == "" and answer["done"] is False
    return line in (": ping", "event: ping")


@pytest.mark.parametrize("path", STREAMS)
def test_waiting_streams_are_not_silent(server: Server, path: str) -> None:
    """The headers come before a sequence is free, then pings, then the whole reply."""
    with busy(server):
        connection = server.begin(STREAMS[path], path)
        response = connection.getresponse()
        assert response.status == 200
        assert response.headers["X-Accel-Buffering"] == "no"
        n_pings = 0
        while n_pings < 3:
            line = response.readline().decode()
            assert line, "the stream has ended"
            n_pings += line.strip() != "" and is_ping(path, line.strip())
    assert ENDS[path] in response.read().decode()
    connection.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_progress_of_a_prompt_instead_of_pings(server: Server, path: str) -> None:
    """In llama-server's form, if requested; the time begins with the first token."""
    book = "Once upon a time. " * 40_000
    prompt = {"prompt": book} if path == "/v1/completions" else {"messages": user(book)}
    with busy(server):
        connection = server.begin({**STREAMS[path], **prompt, "return_progress": True}, path)
        response = connection.getresponse()
        waiting = [progress_of(response) for _ in range(3)]
    total = waiting[0]["total"]
    assert waiting == [{"total": total, "cache": 0, "processed": 0, "time_ms": 0}] * 3
    reading = []
    while (found := progress_of(response)) is not None:
        reading.append(found)
    assert len({one["processed"] for one in reading}) > 2
    for name in ("processed", "time_ms"):
        assert [one[name] for one in reading] == sorted(one[name] for one in reading)
    assert 0 < reading[-1]["processed"] <= total
    assert reading[-1]["time_ms"] > 0
    assert ENDS[path] in response.read().decode()
    connection.close()


def progress_of(response: http.client.HTTPResponse) -> Any:
    """The progress in the next event; None: it is another event."""
    event = response.readline() + response.readline()
    progress = json.loads(event.removeprefix(b"data: ")).get("prompt_progress")
    assert are_pings(event) == (progress is not None)
    return progress


@pytest.mark.parametrize("path", STREAMS)
def test_no_pings_while_there_is_text(server: Server, path: str) -> None:
    body = server.ask(path, STREAMS[path]).body.decode()
    assert ENDS[path] in body
    assert "ping" not in body


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_with_pings_leaves_no_cycle_of_objects(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is free at once, without the garbage collector."""
    monkeypatch.setattr("h2o_cpp.serve.generation_response._FIRST_SECONDS", 0)

    def none_left() -> bool:
        return not any(issubclass(type(one), OutputsResponse) for one in gc.get_objects())

    with Generator(LLAMA, threads=1) as generator, serving(generator, template=PLAIN) as server:
        gc.collect()
        gc.disable()
        try:
            assert server.ask(path, STREAMS[path]).status == 200
            wait_until(none_left)
        finally:
            gc.enable()


def test_errors_after_the_headers_are_events(server: Server) -> None:
    with busy(server):
        connection = server.begin(STREAMS["/v1/completions"])
        response = connection.getresponse()
        server.engine.close()
    assert response.status == 200
    assert "the server is not taking requests" in response.read().decode()
    connection.close()


def test_failed_pings_are_logged(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: GenerationResponse) -> bytes:
        raise RuntimeError("there is no ping")

    monkeypatch.setattr(GenerationResponse, "ping", fail)
    with busy(server):
        connection = server.begin(STREAMS["/v1/completions"])
        response = connection.getresponse()
        wait_until(lambda: "a stream goes on without pings" in caplog.text)
    assert ENDS["/v1/completions"] in response.read().decode()
    assert "there is no ping" in caplog.text
    connection.close()


@packages("openai", "anthropic", "ollama")
@pytest.mark.parametrize("name", ["openai", "responses", "anthropic", "ollama"])
def test_official_clients_ignore_pings(server: Server, name: str) -> None:
    import anthropic
    import ollama
    import openai

    def ending() -> object:
        if name == "ollama":
            with ollama.Client(server.url, timeout=PATIENCE) as own:
                parts = own.chat("tiny", user("Hi"), stream=True, options=LIMIT)
                return [part.done_reason for part in parts][-1]
        if name == "anthropic":
            base = anthropic.Anthropic(base_url=server.url, api_key="x", timeout=PATIENCE)
            message: Any = {"max_tokens": 5, "model": "tiny", "messages": user("Hi")}
            message["extra_body"] = {"temperature": 0}
            with base.messages.stream(**message) as stream:
                return stream.get_final_message().stop_reason
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=PATIENCE)
        if name == "responses":
            answer = client.responses.create(model="tiny", **STREAMS["/v1/responses"])
            return [event.type for event in answer][-1]
        chunks = client.chat.completions.create(model="tiny", **CHAT)
        return [chunk.choices[0].finish_reason for chunk in chunks][-1]

    with busy(server):
        reply = Background(ending)
        wait_until(lambda: server.engine.stats().n_waiting == 1)
        assert reply.runs(0.5)  # several pings
    assert reply.result() in ("length", "max_tokens", "response.incomplete")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(self._path)


@needs("nginx", NGINX is not None)
def test_nginx_passes_pieces_on_as_they_come(server: Server, tmp_path: Path) -> None:
    """A ping is much less than what nginx would buffer."""
    (tmp_path / "nginx.conf").write_text(CONF.format(folder=tmp_path, url=server.url))
    assert NGINX is not None
    command = [NGINX, "-c", str(tmp_path / "nginx.conf"), "-e", str(tmp_path / "log")]
    with subprocess.Popen(command) as nginx:
        try:
            wait_until((tmp_path / "socket").exists)
            with busy(server):
                for path, body in STREAMS.items():
                    connection = _UnixConnection(tmp_path / "socket")
                    text = json.dumps(body)
                    connection.request("POST", path, text, {"Content-Type": "application/json"})
                    response = connection.getresponse()
                    assert is_ping(path, response.readline().decode().strip())
                    connection.close()
        finally:
            nginx.terminate()
