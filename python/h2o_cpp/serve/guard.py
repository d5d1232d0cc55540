"""Who may ask: by the API key, or else by host and origin. Nothing of a body is read before."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from h2o_cpp.serve.errors import ApiError, refuse

_PUBLIC = ("/", "/docs", "/health", "/metrics", "/openapi.json")  # never ask for the key
_STATIC = "/static/"

# Names that only the local network can give out, so no website can point one of its own here.
_LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa")


class Guard:
    """ASGI middleware that refuses requests by their headers alone.

    With a key, the key decides. Without one, a website must not be able to use the server through
    its visitor's browser: not by a name of its own that it points to this machine (the Host
    header), and not by requests from its pages (the Origin header).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        allowed_hosts: Collection[str],
        cors_origins: Collection[str],
    ) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._hosts = {name.lower() for name in allowed_hosts}
        self._origins = {*cors_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            try:
                self._check(scope["path"], dict(scope["headers"]))
            except ApiError as error:
                return await refuse(error, receive, send)
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        if b"content-length" in headers and b"transfer-encoding" in headers:
            raise ApiError(400, "Content-Length and Transfer-Encoding exclude each other")
        if self._key is not None:
            self._check_key(path, headers.get(b"authorization", b""))
        elif "*" not in self._hosts:
            self._check_host(headers)
            self._check_origin(headers)

    def _check_key(self, path: str, authorization: bytes) -> None:
        scheme, _, given = authorization.partition(b" ")
        assert self._key is not None
        if path in _PUBLIC or path.startswith(_STATIC):
            return
        if scheme.lower() != b"bearer" or not secrets.compare_digest(given.strip(), self._key):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        if b"host" not in headers:  # no browser leaves it out
            return
        host = headers[b"host"].decode("latin-1")
        name = _name("//" + host)
        if name not in self._hosts and not _is_address(name) and not _is_local_name(name):
            raise ApiError(
                403,
                f"the host {host!r} is not allowed here: start the server with "
                "--allowed-host NAME, or with --api-key",
                code="host_not_allowed",
            )

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        if b"origin" not in headers or "*" in self._origins:
            return
        origin = headers[b"origin"].decode("latin-1")
        name = _name(origin)
        own = "//" + headers.get(b"host", b"").decode("latin-1")
        if origin in self._origins or name in self._hosts or _is_loopback(name):
            return
        if not name or origin.partition(":")[2].lower() != own.lower():
            raise ApiError(
                403,
                f"requests from {origin!r} are not allowed here: start the server with "
                "--cors-origin ORIGIN, or with --api-key",
                code="origin_not_allowed",
            )


def _name(url: str) -> str:
    """The host that a URL names, in lower case; "" if it names none."""
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
    """Whether a name is one that only the local network can resolve."""
    return bool(name) and ("." not in name or name.endswith(_LOCAL_SUFFIXES))
