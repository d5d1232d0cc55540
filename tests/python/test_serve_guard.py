"""Browser access without an API key: Host, Origin and CORS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")

from h2o_cpp import Generator
from h2o_cpp.serve.app import create_app
from h2o_cpp.serve.guard import Origins
from support.serving import Answer, Server, serving

SHORT: dict[str, Any] = {"prompt": [7, 8, 9], "max_tokens": 2}
LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"


@contextmanager
def small_server(**options: Any) -> Iterator[Server]:
    with Generator(LLAMA, threads=1) as generator, serving(generator, **options) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with small_server(
        allowed_hosts=["h2o.example.org"], cors_origins=["https://chat.example.org"]
    ) as server:
        yield server


def ask(server: Server, **headers: str) -> Answer:
    return server.ask("/v1/completions", SHORT, **headers)


@pytest.mark.parametrize(
    "host",
    [
        *["localhost", "LOCALHOST:8000", "localhost.:8000", "a.localhost", "127.0.0.1:8000"],
        *["127.1.2.3", "[::1]:8000", "192.168.1.5:8000", "0.0.0.0:8000", "gpu-box", "gpu-box:80"],
        *["gpu.local", "model.default.svc.cluster.local", "h2o.example.org", "H2O.example.org:8"],
    ],
)
def test_local_and_allowed_hosts(server: Server, host: str) -> None:
    assert ask(server, Host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *["example.org", "evil.example.org:8000", "h2o.example.org.evil.com", "localhost.evil.com"],
        *["127.0.0.1.nip.io", "127.0.0.1@evil.com", "evil.com#localhost", "[::1", "", "a..b"],
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/", "/metrics", "/openapi.json"])
def test_public_hosts_are_rejected(server: Server, host: str, path: str) -> None:
    answer = server.ask(path, SHORT if path.startswith("/v1") else None, Host=host)
    assert answer.status == 403
    assert answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "origin",
    [
        *["http://localhost:3000", "http://127.0.0.1", "http://[::1]:5173", "tauri://localhost"],
        *["http://gpu-box:8000", "https://gpu-box:8000"],  # same origin
        *["https://h2o.example.org", "https://chat.example.org"],
    ],
)
def test_local_and_allowed_origins(server: Server, origin: str) -> None:
    assert ask(server, Host="gpu-box:8000", Origin=origin).status == 200


@pytest.mark.parametrize(
    "origin",
    [
        *[
            "https://example.org",
            "http://chat.example.org",
            "http://gpu-box",
            "null",
            "",
            "file://",
        ],
        *["http://203.0.113.5", "http://gpu-box:8000.evil.com", "http://localhost.evil.com"],
    ],
)
def test_foreign_origins_are_rejected(server: Server, origin: str) -> None:
    """Any website's form can send such a request without reading the response."""
    answer = ask(server, Host="gpu-box:8000", Origin=origin, **{"Content-Type": "text/plain"})
    assert answer.status == 403
    assert answer.json()["error"]["code"] == "origin_not_allowed"


def test_whole_urls_as_targets(server: Server) -> None:
    """Clients send it to proxies: the URL's host counts, not the header's."""
    for host, path, header, status in (
        ("http://127.0.0.1:8000", "/v1/models?limit=1", "localhost", 200),
        ("HTTP://localhost", "/v1/models/tin%79", "example.org", 200),
        ("http://localhost", "", "localhost", 200),
        ("http://localhost", "/v1/nothing", "localhost", 404),
        ("http://example.org", "/v1/models", "localhost", 403),
        ("ftp://localhost", "/v1/models", "localhost", 404),
    ):
        assert server.ask(host + path, Host=header).status == status, host + path


def test_api_key_replaces_host_and_origin_checks() -> None:
    """For example behind a proxy with its own host name."""
    with small_server(api_key="sesame") as server:
        foreign = {"Host": "example.org", "Origin": "https://other.example.org"}
        assert ask(server, **foreign).status == 401
        assert ask(server, **foreign, Authorization="Bearer sesame").status == 200


@pytest.mark.parametrize(
    ("path", "status"), [("/docs", 200), ("/docs/", 307), ("/health/", 200), ("/v1/models/", 401)]
)
def test_public_pages_need_no_key(path: str, status: int) -> None:
    """Also with a slash at the end."""
    with small_server(api_key="sesame") as server:
        assert server.ask(path).status == status


def test_any_host() -> None:
    with small_server(allowed_hosts=["*"]) as server:
        assert ask(server, Host="example.org", Origin="https://other.example.org").status == 200


def preflight(server: Server, origin: str) -> Answer:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization,content-type"
    return server.ask("/v1/completions", method="OPTIONS", **headers)


class TestCors:
    @pytest.mark.parametrize(
        "origin",
        [
            *["https://chat.example.org", "http://localhost:3000", "http://127.0.0.1:8080"],
            *["http://[::1]:5173", "http://a.localhost", "https://h2o.example.org"],
        ],
    )
    def test_allowed_origin(self, server: Server, origin: str) -> None:
        answer = preflight(server, origin)
        assert answer.status == 200
        assert answer.headers["Access-Control-Allow-Origin"] == origin
        assert "authorization" in answer.headers["Access-Control-Allow-Headers"]
        assert ask(server, Origin=origin).headers["Access-Control-Allow-Origin"] == origin
        # The browser may read errors, too.
        error = server.ask("/v1/completions", {"x": 1}, Origin=origin)
        assert (error.status, error.headers["Access-Control-Allow-Origin"]) == (400, origin)

    @pytest.mark.parametrize("origin", ["https://example.org", "http://localhost.evil.com", "null"])
    def test_other_origins(self, server: Server, origin: str) -> None:
        for answer in (preflight(server, origin), ask(server, Origin=origin)):
            assert answer.status in (400, 403)
            assert "Access-Control-Allow-Origin" not in answer.headers

    def test_local_pages_need_no_option(self) -> None:
        with small_server() as server:
            origin = "http://localhost:3000"
            for answer in (preflight(server, origin), ask(server, Origin=origin)):
                assert answer.status == 200
                assert answer.headers["Access-Control-Allow-Origin"] == origin
            assert preflight(server, "https://example.org").status == 400

    @pytest.mark.parametrize(
        ("pattern", "allowed", "others"),
        [
            (
                "https://*.example.org",
                ["https://a.example.org", "https://a.b.example.org"],
                ["http://a.example.org", "https://example.org", "https://a.example.org.evil.com"],
            ),
            (
                "http://chat.example.org:*",
                ["http://chat.example.org", "http://chat.example.org:8080"],
                ["http://chat.example.org.evil.com", "http://chat-example.org:8080"],
            ),
            ("HTTPS://Example.org:443", ["https://example.org"], ["https://example.org:444"]),
            ("https://example.org:444", ["https://example.org:444"], ["https://example.org"]),
            ("chrome-extension://*", ["chrome-extension://abc"], ["https://example.org"]),
            ("null", ["null"], ["https://null"]),
            ("*", ["https://example.org", "null"], []),
        ],
    )
    def test_patterns(self, pattern: str, allowed: list[str], others: list[str]) -> None:
        origins = Origins([pattern], [])
        assert [one for one in [*allowed, *others] if origins.allow(one)] == allowed

    @pytest.mark.parametrize(
        "origin",
        [
            "example.org",
            "https://example.org/",
            "https://",
            "https://a b.org",
            "https://a.org:x",
            "",
        ],
    )
    def test_origins_that_no_page_has_are_refused(self, tiny_opt: Path, origin: str) -> None:
        with (
            Generator(tiny_opt, threads=1) as generator,
            pytest.raises(ValueError, match="expected an origin such as"),
        ):
            create_app(generator, name="tiny", cors_origins=[origin])

    @pytest.mark.parametrize("origin", ["https://chat.example.org", "https://example.org"])
    def test_private_network_preflight(self, server: Server, origin: str) -> None:
        """Browsers ask before a page of the Internet uses a server of the local network."""
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        headers["Access-Control-Request-Private-Network"] = "true"
        answer = server.ask("/v1/completions", method="OPTIONS", **headers)
        is_allowed = origin == "https://chat.example.org"
        assert answer.status == (200 if is_allowed else 400)
        assert ("Access-Control-Allow-Origin" in answer.headers) is is_allowed

    def test_preflight_needs_no_key(self) -> None:
        """Browsers send preflight requests without the key."""
        with small_server(api_key="sesame", cors_origins=["*"]) as server:
            headers = {"Origin": "https://a.org", "Access-Control-Request-Method": "POST"}
            assert server.ask("/v1/completions", method="OPTIONS", **headers).status == 200
            answer = ask(server, Origin="https://a.org", Authorization="Bearer sesame")
            assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, "*")
