"""Idle, slow and non-reading clients, and too many of them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from support.background import PATIENCE, Background
from support.serving import FOREVER, Server, serving, wait_until

LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"
SHORT: dict[str, Any] = {"prompt": [7, 8, 9], "max_tokens": 2}
ENDLESS: dict[str, Any] = {"prompt": [5, 6], "stream": True, **FOREVER}
REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def small_server(**listen: int) -> Iterator[Server]:
    with (
        Generator(LLAMA, hh=12, threads=1, max_sequences=4) as generator,
        serving(generator, listen=listen, max_tokens=10**9) as server,
    ):
        yield server


def connect(server: Server, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    sock.sendall(data)
    return sock


def read_all(sock: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


def error_in(data: bytes) -> tuple[int, Any]:
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


class TestTimeouts:
    def test_header_timeout(self) -> None:
        with small_server(header_timeout=1) as server:
            with connect(server) as silent:
                assert read_all(silent) == b""
            with connect(server, REQUEST[:-2]) as half:
                assert error_in(read_all(half)) == (
                    408,
                    {
                        "message": "the headers did not arrive within 1 s",
                        "type": "invalid_request_error",
                        "param": None,
                        "code": "timeout",
                    },
                )
            with connect(server, REQUEST + REQUEST[:9]) as second:  # the second one is incomplete
                answers = read_all(second)
            assert answers.startswith(b"HTTP/1.1 200 OK")
            assert server.ask("/health").status == 200

    def test_unread_body_does_not_keep_the_connection(self) -> None:
        """After a response that did not wait for the body, more of the body is not awaited."""
        with small_server(header_timeout=1, keep_alive=1) as server:
            head = b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n"
            with connect(server, head) as sock:
                assert sock.recv(65536).startswith(b"HTTP/1.1 405")
                sock.settimeout(0.05)
                for _ in range(int(PATIENCE / 0.05)):  # one byte at a time
                    try:
                        sock.sendall(b"x")
                        if not sock.recv(65536):
                            break
                    except TimeoutError:
                        continue
                    except ConnectionError:
                        break
                else:
                    raise AssertionError("the connection was not closed")

    def test_keep_alive_timeout(self) -> None:
        """Clients are told how long a connection may be idle."""
        with small_server(keep_alive=1) as server, connect(server, REQUEST) as sock:
            answer = read_all(sock)
        assert b'{"status":"ok"}' in answer
        assert b"keep-alive: timeout=1\r\n" in answer.lower()

    def test_connections_are_kept_longer_than_clients_use_them(self) -> None:
        """nginx and other proxies use an idle connection for up to 60 s."""
        with small_server() as server:
            assert server.ask("/health").headers["Keep-Alive"] == "timeout=75"

    def test_no_timeout_for_generation(self) -> None:
        """A complete request may take any time."""
        with small_server(header_timeout=1, write_timeout=1, keep_alive=1) as server:
            connection = server.begin(ENDLESS)
            response = connection.getresponse()
            with connect(server) as silent:
                second = Background(lambda: read_all(silent))
                while second.runs(0):  # reading meanwhile, as the server has a write timeout
                    assert response.readline()
            for _ in range(100):
                assert response.readline()
            assert server.engine.stats().n_active == 1
            connection.close()

    def test_write_timeout_for_clients_that_do_not_read(self) -> None:
        with small_server(write_timeout=1) as server, socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            body = json.dumps({**ENDLESS, "kept_every": 1}).encode()
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            wait_until(lambda: server.engine.stats().n_active == 1)
            wait_until(lambda: server.engine.stats().n_active == 0)
            wait_until(lambda: server.n_connections == 0)


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"x" * 400_000, b"GET /\r\n\r\n"],
)
def test_invalid_http_request(data: bytes) -> None:
    with small_server() as server:
        with connect(server, data) as sock:
            status, error = error_in(read_all(sock))
        assert (status, error["message"]) == (400, "Invalid HTTP request received.")
        assert server.ask("/health").status == 200


def test_invalid_chunked_body() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with small_server() as server:
        with connect(server, head + b"no number\r\n") as sock:
            assert error_in(read_all(sock))[0] == 400
        wait_until(lambda: server.n_connections == 0)


class TestMaxConnections:
    def test_idle_connections_are_dropped_first(self) -> None:
        """The oldest incomplete requests are dropped; other clients are not affected."""
        with small_server(max_connections=8) as server, ExitStack() as sockets:
            slow = [b"", REQUEST[:9], b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"]
            slow[2] += b"Content-Length: 9\r\n\r\n{"
            held = [sockets.enter_context(connect(server, slow[i % 3])) for i in range(100)]
            for _ in range(20):
                assert server.ask("/v1/completions", SHORT).status == 200
            wait_until(lambda: server.n_connections <= 8)
            first = b""
            with suppress(ConnectionResetError):  # if it was closed before its bytes were read
                first = read_all(held[1])
            assert not first or error_in(first)[1]["code"] == "too_many"

    def test_generating_connections_are_kept(self) -> None:
        """A further connection is rejected."""
        with small_server(max_connections=3) as server, ExitStack() as stack:
            streams: list[tuple[HTTPConnection, HTTPResponse]] = []
            for _ in range(3):
                connection = server.begin(ENDLESS)
                stack.callback(connection.close)
                streams.append((connection, connection.getresponse()))
            with connect(server, REQUEST) as sock:
                status, error = error_in(read_all(sock))
            assert status == 503
            assert error["message"] == "there are 3 connections, the limit"
            assert error["code"] == "too_many"
            for _, response in streams:
                assert response.readline()
            streams[0][0].close()
            streams[0][1].close()
            wait_until(lambda: server.n_connections == 2)
            assert server.ask("/health").status == 200

    @pytest.mark.parametrize("stream", [False, True])
    def test_half_closed_connections_count_as_closed(self, stream: bool) -> None:
        with small_server() as server, ExitStack() as stack:
            connection = server.begin({**ENDLESS, "stream": stream})
            stack.callback(connection.close)
            wait_until(lambda: server.metric("h2o_sequences_active") == 1)
            connection.sock.shutdown(socket.SHUT_WR)
            wait_until(lambda: server.metric("h2o_sequences_active") == 0)

    def test_rejected_connections_are_closed(self) -> None:
        with small_server(max_connections=1) as server, ExitStack() as stack:
            connection = server.begin(ENDLESS)
            stack.callback(connection.close)
            connection.getresponse()
            rejected = [stack.enter_context(connect(server, REQUEST)) for _ in range(200)]
            for sock in rejected:
                with suppress(ConnectionResetError):
                    read_all(sock)
            assert server.n_connections == 1


@pytest.mark.parametrize(
    "name", ["max_connections", "header_timeout", "write_timeout", "keep_alive"]
)
def test_limits_out_of_range(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"), small_server(**{name: 0}):
        pass
