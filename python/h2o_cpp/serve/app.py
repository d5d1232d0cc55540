"""The ASGI application: all endpoints, and the web page."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI
from fastapi.responses import FileResponse, HTMLResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.types import Message, Receive, Scope, Send

from h2o_cpp import __version__
from h2o_cpp.generator import Generator
from h2o_cpp.options import function_with, make_options
from h2o_cpp.serve import (
    completions,
    embeddings,
    llama_cpp,
    llama_cpp_completion,
    messages,
    models,
    ollama,
    reranking,
    responses_api,
)
from h2o_cpp.serve.bodies import Bodies, BodyLimits
from h2o_cpp.serve.catalog import Catalog
from h2o_cpp.serve.docs_page import docs_page
from h2o_cpp.serve.errors import ERRORS, add_handlers, api_of, closed
from h2o_cpp.serve.guard import PUBLIC, Cors, Guard, Origins
from h2o_cpp.serve.log import id_of, request_id
from h2o_cpp.serve.metrics import EngineCollector, RequestMetrics
from h2o_cpp.serve.openai_responses import Health
from h2o_cpp.serve.options import AccessOptions, AppOptions
from h2o_cpp.serve.schema import body_schemas
from h2o_cpp.serve.service import Service
from h2o_cpp.serve.stored_responses import StoredResponses
from h2o_cpp.serve.telemetry import make_telemetry

ROUTERS = (
    completions.router,
    messages.router,
    responses_api.router,
    ollama.router,
    embeddings.router,
    reranking.router,
    models.router,
    llama_cpp.router,
    llama_cpp_completion.router,
)

_PAGES = ("/docs", "/static")  # Starlette handles a slash after these
_WITHOUT_V1 = (
    *("/chat/completions", "/chat/completions/input_tokens"),
    *("/responses", "/responses/input_tokens", "/models"),
)

# Describes the API key in the OpenAPI document.
_KEY = {"type": "http", "scheme": "bearer", "description": "the server's API key"}


@dataclass(frozen=True, kw_only=True)
class _Arguments(AppOptions):
    """The arguments of create_app(), for type checkers."""

    generator: Generator = field(kw_only=False)
    name: str


@function_with(_Arguments)
def create_app(generator: Generator, *, name: str, **options: Any) -> FastAPI:
    """Create an ASGI application that serves one Generator, which it owns while it runs.

    name: the model's name in requests.
    template: a Jinja2 chat template, its file, or a built-in one's name; default: the model
        file's own. Without one, chat requests are rejected.
    tool_parser: the format of tool calls, as h2o_cpp.reply names it; default: by the template.
    max_queue: prompts that may wait for a sequence; further requests get status 429.
    max_tokens: largest max_tokens of a request; default: n_ctx.
    max_prompt: longest prompt in tokens; default: n_ctx, or any if sequences may be endless.
    defaults: options of requests that do not set them.
    api_key: the key, or keys, that clients must send one of. Without a key, the Host and Origin
        headers are checked.
    max_requests_per_key: concurrent requests per key; further ones get status 429.
    max_body_bytes: largest request body.
    max_bodies_bytes: for all requests in progress; bodies up to 64 KiB are always accepted.
    body_timeout: seconds within which a body must arrive.
    allowed_hosts: host names of this server besides local names and IP addresses; "*": any name.
    cors_origins: origins of web pages that may use the server, besides those of localhost and of
        allowed_hosts, such as "https://example.org", "https://*.example.org" or
        "http://example.org:*"; "*": any.

    Raises ValueError for options out of range and an invalid template, and TypeError for unknown
    options.
    """
    made = make_options(AppOptions, options)
    service = Service(generator, name=name, options=made)
    app = create_app_of(Catalog.of(service), made)
    app.state.service = service
    return app


def create_app_of(catalog: Catalog, options: AccessOptions) -> FastAPI:
    """Create an ASGI application that serves the models of a catalog.

    Raises ValueError for an origin that no page can have.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with catalog.run():
            unloading = asyncio.ensure_future(catalog.unload_idle())
            try:
                yield
            finally:
                unloading.cancel()
                if app.state.telemetry is not None:
                    await asyncio.to_thread(app.state.telemetry.close)

    limits = BodyLimits(
        each=options.max_body_bytes,
        total=options.max_bodies_bytes,
        seconds=options.body_timeout,
    )
    app = _Application(
        title="h2o.cpp",
        version=__version__,
        description="Texts from a model with a bounded, heavy-hitter (H2O) KV cache.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load files from a CDN
        redoc_url=None,
        responses=ERRORS,
    )
    app.state.catalog = catalog
    app.state.draining = False
    app.state.has_keys = bool(options.keys)
    app.state.stored_responses = defaultdict(StoredResponses)  # by key
    registry = CollectorRegistry()
    app.state.metrics = RequestMetrics(registry)
    app.state.telemetry = make_telemetry()
    origins = Origins(options.cors_origins, options.allowed_hosts)
    app.add_middleware(Bodies, limits=limits)
    app.add_middleware(
        Guard,
        api_keys=options.keys,
        max_requests_per_key=options.max_requests_per_key,
        origins=origins,
    )
    app.add_middleware(Cors, origins=origins)
    add_handlers(app)
    for router in ROUTERS:
        app.router.routes += router.routes  # included ones would match each request twice
    _add_state(app, catalog, limits, registry)
    _add_page(app)
    return app


class _Application(FastAPI):
    """A FastAPI application that documents the bodies of endpoints."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; some paths also work without /v1, as in llama.cpp.

        A slash at the end of an API's path has no effect. HEAD is answered as GET; the server
        leaves the body out. Every response has the request's id, and is counted.
        """
        if scope["type"] != "http":
            return await super().__call__(scope, receive, send)
        scope = {**scope, **_origin_form(scope)}
        if scope["method"] == "HEAD":
            scope["method"] = "GET"
        path = scope["path"].rstrip("/") or "/"
        if path not in _PAGES:
            scope["path"] = f"/v1{path}" if path in _WITHOUT_V1 else path
        id = id_of(scope["headers"])
        name = b"request-id" if api_of(scope) == "Anthropic" else b"x-request-id"
        headers = [(name, id.encode())]
        telemetry = self.state.telemetry if scope["method"] == "POST" else None

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.state.metrics.responses.labels(str(message["status"])).inc()
                if telemetry is not None:
                    telemetry.answered(message["status"])
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        token = request_id.set(id)
        try:
            with nullcontext() if telemetry is None else telemetry.span(scope, id):
                await super().__call__(scope, receive, send_with_id)
        finally:
            request_id.reset(token)

    def openapi(self) -> dict[str, Any]:
        is_new = self.openapi_schema is None
        document: dict[str, Any] = super().openapi()
        if is_new:
            document["components"]["schemas"] |= body_schemas()
            if self.state.has_keys:
                document["components"]["securitySchemes"] = {"HTTPBearer": _KEY}
                for path in document["paths"].keys() - {*PUBLIC}:
                    for operation in document["paths"][path].values():
                        operation["security"] = [{"HTTPBearer": []}]
        return document


def _origin_form(scope: Scope) -> Scope:
    """Takes the host of a request's target if that is a whole URL (RFC 9112, 3.2.2)."""
    scheme, mark, rest = (scope.get("raw_path") or b"").partition(b"://")
    if not mark or scheme.lower() not in (b"http", b"https"):
        return {}
    host, _, path = rest.partition(b"/")
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    path = b"/" + path
    return {
        "headers": [(b"host", host), *others],
        "raw_path": path,
        "path": unquote(path.decode("ascii")),
    }


def _add_page(app: FastAPI) -> None:
    static = Path(str(files("h2o_cpp.serve").joinpath("static")))
    app.mount("/static", StaticFiles(directory=static))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(static / "index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))


def _add_state(
    app: FastAPI, catalog: Catalog, limits: BodyLimits, registry: CollectorRegistry
) -> None:
    """Add the endpoints that run no model."""
    registry.register(EngineCollector(catalog, limits))

    @app.get("/v1/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Health:
        """Whether the server works: status 200 or 503."""
        if catalog.closed:
            raise closed()
        return Health()

    @app.get("/ready")
    async def ready() -> Health:
        """Whether to send it requests: status 503 from the signal to end on."""
        if catalog.closed or app.state.draining:
            raise closed()
        return Health()

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Counters and gauges in Prometheus's text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)
