"""The options of the server, each declared once: of a model, of the application, of the process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from h2o_cpp.arguments import check_int
from h2o_cpp.generation.request import StreamOptions, check_sampling
from h2o_cpp.model.truncation import Truncation, check_truncation
from h2o_cpp.options import Options
from h2o_cpp.reply.formats import format_named
from h2o_cpp.serve.log import LogFormat

MAX_BODY_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Defaults:
    """The options of requests that do not set them."""

    sampling: StreamOptions = field(default_factory=StreamOptions)
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    # Conversations protect their system prompts; "auto": those of at most half of the budget.
    protect: Literal["system", "auto"] | None = None
    policy: str | None = None  # requests with hh have it
    # Prompts that are too long get status 400 ("error") or lose their oldest turns or, in texts,
    # their oldest tokens ("auto").
    truncation: Truncation = "error"

    def __post_init__(self) -> None:
        """Raises ValueError, with the names that the options have in a list of models."""
        tables = {"sampling": self.sampling, "chat_template_kwargs": self.variables}
        for name, value in tables.items():
            if not isinstance(value, Mapping):
                raise ValueError(f"{name}={value!r}, expected a table")
        check_sampling(self.sampling)
        check_truncation(self.truncation)


@dataclass(frozen=True, kw_only=True)
class ServiceOptions(Options):
    """How a model is served. create_app() documents the options."""

    template: str | None = None
    tool_parser: str | None = None
    max_queue: int = 64
    max_tokens: int | None = None
    max_prompt: int | None = None
    defaults: Defaults = Defaults()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("max_queue", self.max_queue, 1)
        for name in ("max_tokens", "max_prompt"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if self.tool_parser is not None:
            format_named(self.tool_parser)


@dataclass(frozen=True, kw_only=True)
class AccessOptions(Options):
    """Who may use the application, and how much at once. create_app() documents the options."""

    api_key: str | Collection[str] | None = None
    max_requests_per_key: int | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    max_bodies_bytes: int = 64 * 2**20
    body_timeout: int = 60
    allowed_hosts: Collection[str] = ()
    cors_origins: Collection[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in self.keys:
            raise ValueError("api_key is empty, expected a non-empty key or None")
        if self.max_requests_per_key is not None:
            check_int("max_requests_per_key", self.max_requests_per_key, 1)
            if not self.keys:
                raise ValueError("max_requests_per_key is given without api_key")
        check_int("max_body_bytes", self.max_body_bytes, 1, None)
        check_int("max_bodies_bytes", self.max_bodies_bytes, 1, None)
        check_int("body_timeout", self.body_timeout, 1)

    @property
    def keys(self) -> list[str]:
        """The API keys."""
        if self.api_key is None:
            return []
        return [self.api_key] if isinstance(self.api_key, str) else [*self.api_key]


@dataclass(frozen=True, kw_only=True)
class AppOptions(ServiceOptions, AccessOptions):
    """All options of create_app(), which documents them."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """How the process listens and ends.

    port: 0: any free port.
    grace: seconds for requests in progress when the server ends; before, for `drain` seconds,
        /ready says that it will end.
    max_connections: default: 512, or half of the limit of open files if that is less.
    header_timeout: seconds within which the headers of a request must arrive.
    write_timeout: seconds within which a client must read something.
    keep_alive: idle seconds allowed between two requests of a connection, as clients are told;
        the default is longer than what most of them and proxies allow.
    tls_cert, tls_key: PEM files for HTTPS; without tls_key, tls_cert has the key too.
    log_format: of the log's lines.
    """

    host: str
    port: int
    grace: int
    drain: int = 0
    max_connections: int | None = None
    header_timeout: int = 10
    write_timeout: int = 60
    keep_alive: int = 75
    tls_cert: str | None = None
    tls_key: str | None = None
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("port", self.port, 0, 65535)
        for name in ("grace", "drain"):
            check_int(name, getattr(self, name), 0)
        for name in ("header_timeout", "write_timeout", "keep_alive"):
            check_int(name, getattr(self, name), 1)
        if self.max_connections is not None:
            check_int("max_connections", self.max_connections, 1)
        if self.tls_cert == "":
            raise ValueError("tls_cert is empty, expected a file")
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key is given without tls_cert, expected both or only tls_cert")
