"""Access control by API key, or by the Host and Origin headers, before any body is read; CORS."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from h2o_cpp.serve.errors import ApiError, refuse

# Allowed without a key.
PUBLIC = (
    *("/", "/docs", "/docs/", "/openapi.json"),
    *("/health", "/v1/health", "/ready", "/metrics"),
)
_STATIC = "/static/"

# Only the local network resolves these names, so no website can use one for this server.
_LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa")


_ORIGIN = re.compile(
    r"null|(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[^/:@?#\[\]\s]+)"
    r"(?::(?P<port>\d+|\*))?"
)


class Origins:
    """The web pages that may use the server without a key, besides its own.

    Attributes: `listed`, origins; `hosts`, names of the server.
    """

    def __init__(self, origins: Collection[str], hosts: Collection[str]) -> None:
        """origins: of pages, in which * stands for anything; hosts: names of this server.

        Raises ValueError for an origin that no page can have.
        """
        self.listed = {*origins}
        self.hosts = {name.lower() for name in hosts}
        self._patterns = [_pattern(origin) for origin in self.listed - {"*"}]

    def allow(self, origin: str) -> bool:
        """Whether pages of this origin may: listed ones, and those of this machine."""
        name = _name(origin)
        listed = "*" in self.listed or any(one.fullmatch(origin) for one in self._patterns)
        return listed or name in self.hosts or _is_loopback(name)


def _pattern(origin: str) -> re.Pattern[str]:
    """A pattern for an origin as browsers send it: in lower case, without the usual port."""
    found = _ORIGIN.fullmatch(origin.lower())
    if found is None:
        raise ValueError(
            f"cors_origins has {origin!r}, expected an origin such as https://example.org, "
            "https://*.example.org or http://example.org:*, or *"
        )
    scheme, host, port = found["scheme"], found["host"], found["port"]
    any_host = re.escape(host or origin).replace(r"\*", r"[^/:]+")
    if host is None:
        return re.compile(any_host)
    any_port = r"(?::\d+)?" if port == "*" else f":{port}"
    if port is None or (scheme, port) in (("http", "80"), ("https", "443")):
        any_port = ""
    return re.compile(re.escape(f"{scheme}://") + any_host + any_port)


class Cors(CORSMiddleware):
    """ASGI middleware that lets pages of allowed origins read responses."""

    def __init__(self, app: ASGIApp, *, origins: Origins) -> None:
        super().__init__(
            app,
            allow_origins=[*origins.listed],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["X-Request-Id"],
        )
        self._origins = origins

    def is_allowed_origin(self, origin: str) -> bool:
        return self._origins.allow(origin)


class Guard:
    """ASGI middleware that rejects requests by their headers.

    With API keys, the key decides. Without keys, a website must not reach the server through a
    visitor's browser: neither through a domain that resolves to this machine (checked by the Host
    header) nor by requests from its pages (checked by the Origin header).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Collection[str],
        max_requests_per_key: int | None,
        origins: Origins,
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_requests = max_requests_per_key
        self._n_requests: Counter[bytes] = Counter()  # in progress, by key
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            scope["api_key"] = key = self._check(scope["path"], dict(scope["headers"]))
        except ApiError as error:
            return await refuse(error, scope, receive, send)
        self._n_requests[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._n_requests[key] -= 1

    def _check(self, path: str, headers: dict[bytes, bytes]) -> bytes:
        """The key that the request counts for, or b"" without keys. Raises ApiError."""
        if b"content-length" in headers and b"transfer-encoding" in headers:
            raise ApiError(400, "a request cannot have both Content-Length and Transfer-Encoding")
        if self._keys:
            return self._check_key(path, headers)
        if "*" not in self._origins.hosts:
            self._check_host(headers)
            self._check_origin(headers)
        return b""

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> bytes:
        if path in PUBLIC or path.startswith(_STATIC):
            return b""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")  # Anthropic's clients
        # Compared with every key, so that the timing reveals nothing.
        found = [key for key in self._keys if secrets.compare_digest(given.strip(), key)]
        if not found:
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        if self._max_requests is not None and self._n_requests[found[0]] >= self._max_requests:
            message = f"{self._max_requests} requests of this key are in progress, the limit"
            raise ApiError(429, message, code="too_many")
        return found[0]

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        if b"host" not in headers:  # browsers always send it
            return
        host = headers[b"host"].decode("latin-1")
        name = _name("//" + host)
        if name not in self._origins.hosts and not _is_address(name) and not _is_local_name(name):
            raise ApiError(
                403,
                f"the host {host!r} is not allowed; start the server with "
                "--allowed-host NAME, or with --api-key",
                code="host_not_allowed",
            )

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        if b"origin" not in headers:
            return
        origin = headers[b"origin"].decode("latin-1")
        own = "//" + headers.get(b"host", b"").decode("latin-1")
        if self._origins.allow(origin):
            return
        if not _name(origin) or origin.partition(":")[2].lower() != own.lower():
            raise ApiError(
                403,
                f"requests from {origin!r} are not allowed; start the server with "
                "--cors-origin ORIGIN, or with --api-key",
                code="origin_not_allowed",
            )


def _name(url: str) -> str:
    """The lower-case host of a URL; "" if it has none."""
    try:
        return (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    if _is_address(name):
        return ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")


def _is_local_name(name: str) -> bool:
    """Whether only the local network can resolve this name."""
    return bool(name) and ("." not in name or name.endswith(_LOCAL_SUFFIXES))
