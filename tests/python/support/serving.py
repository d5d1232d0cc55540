"""A server in a thread, and an HTTP client."""

from __future__ import annotations

import gc
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from h2o_cpp import Completion, Engine, Generator
from support.background import PATIENCE

pytest.importorskip("uvicorn", reason="uvicorn is not installed (extra: serve)")
pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")
pytest.importorskip("prometheus_client", reason="prometheus_client is missing (extra: serve)")

from h2o_cpp.serve.app import create_app
from h2o_cpp.serve.server import Server as Process

FOREVER: dict[str, Any] = {"max_tokens": 10**9, "ignore_eos": True, "seed": 1}


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Server(NamedTuple):
    """A running server."""

    app: Any
    port: int
    process: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> Engine:
        engine: Engine = self.app.state.service.engine
        return engine

    @property
    def n_connections(self) -> int:
        return len(self.process.server_state.connections)

    def ask(
        self, path: str, body: Any = None, *, method: str | None = None, **headers: str
    ) -> Answer:
        """Send a request; bodies other than bytes are sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            if body is not None and not isinstance(body, bytes):
                body = json.dumps(body).encode()
            method = method or ("GET" if body is None else "POST")
            connection.request(method, path, body, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def begin(self, body: Any, path: str = "/v1/completions") -> http.client.HTTPConnection:
        """Send a request without waiting for the response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def metric(self, name: str) -> float:
        """A metric's value; 0 for a label without a sample."""
        lines = self.ask("/metrics").body.decode().splitlines()
        values = [line.split()[1] for line in lines if line.startswith(f"{name} ")]
        assert values or "{" in name, f"no metric {name}"
        return float(values[0]) if values else 0


@contextmanager
def serving(
    generator: Generator, *, listen: dict[str, Any] | None = None, **options: Any
) -> Iterator[Server]:
    """Serve a generator as "tiny"; `listen` are arguments of Server, `options` of create_app."""
    app = create_app(generator, name="tiny", **options)
    server = Process(app, **{"host": "127.0.0.1", "port": 0, "grace": 0, **(listen or {})})
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    try:
        yield Server(app, server.servers[0].sockets[0].getsockname()[1], server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "timed out"


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


def no_text_left() -> bool:
    """Whether no Completion object is alive."""
    gc.collect()
    return not any(type(item) is Completion for item in gc.get_objects())


def events(body: bytes) -> list[Any]:
    """The parsed events of an SSE stream; the last one is the string [DONE]."""
    found: list[Any] = []
    for event in body.decode().split("\n\n")[:-1]:
        data = event.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found
