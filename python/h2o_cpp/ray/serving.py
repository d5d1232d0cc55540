"""The server as a Ray Serve application: replicas of the model behind a front end."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Scope

from h2o_cpp.generator import Generator
from h2o_cpp.ray.options import actor_options
from h2o_cpp.ray.routing import BeginningRouter, beginning_of
from h2o_cpp.serve.app import create_app
from h2o_cpp.serve.errors import ApiError, api_of, closed
from h2o_cpp.serve.generation_response import are_pings, error_event
from h2o_cpp.serve.options import MAX_BODY_BYTES

Head = tuple[int, list[tuple[bytes, bytes]]]  # status and headers

_ATTEMPTS = 3  # so that a request that kills replicas cannot kill all of them
_NO_LIMIT = 100_000  # each replica's Engine limits its own queue
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")


class Model:
    """A replica with the application of `h2o-cpp serve`; Front forwards requests to it."""

    def __init__(self, model: str, server: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """server: arguments of create_app; options: arguments of Generator."""
        generator = Generator(model, **options)
        self._app = create_app(generator, **{"name": generator.path.stem, **server})
        self._catalog = self._app.state.catalog
        self._running = self._catalog.run()
        self._running.__enter__()

    def check_health(self) -> None:
        """Raises RuntimeError if the Engine is closed; Ray then restarts the replica."""
        if self._catalog.closed:
            raise RuntimeError("the Engine is closed")

    async def answer(
        self, scope: Scope, body: bytes, *, beginning: str = ""
    ) -> AsyncIterator[Head | bytes]:
        """The application's response: status and headers, then the body.

        Available parts are joined, because each one costs more than a token. Cancelling disconnects
        the client. `beginning` is for the router.
        """
        messages: asyncio.Queue[Message] = asyncio.Queue()
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()  # the client stays connected
            return unread.pop()

        task = asyncio.ensure_future(self._app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait({}))
        try:
            start = await messages.get()
            if start:
                yield start["status"], start["headers"]
            more = bool(start)
            while more:
                parts = [await messages.get()]
                while not messages.empty():
                    parts.append(messages.get_nowait())
                more = all(part.get("more_body") for part in parts)
                yield b"".join(part.get("body", b"") for part in parts)
            await task  # raises the application's exception
        finally:
            task.cancel()


class Front:
    """Forwards requests to a replica, or to another one if it dies before it answers."""

    def __init__(self, model: DeploymentHandle, max_body_bytes: int) -> None:
        self._model = model.options(method_name="answer", stream=True)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """The replica's response, streamed."""
        if request.url.path.endswith("/metrics"):
            return ApiError(404, "metrics are per replica; use Ray's metrics").response()
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > self._max_body_bytes:
                break  # the replica rejects it
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        prefix: str = request.scope.get("root_path", "")  # the route_prefix
        scope["path"] = request.scope["path"].removeprefix(prefix)
        scope["raw_path"] = scope["path"].encode()
        parts = self._parts(scope, body)
        head: Head | None = None
        async for message in parts:
            if isinstance(message, bytes):
                assert head is not None
                response = StreamingResponse(_body(message, parts), head[0])
                response.raw_headers = list(head[1])
                return response
            head = message
        return closed().response(api=api_of(scope))

    async def _parts(self, scope: Scope, body: bytes) -> AsyncGenerator[Head | bytes, None]:
        """A replica's answer; if it dies before it sends more than pings, another one's.

        The head of the latter follows, unless there were pings. Without an answer, there is
        nothing, or an error after the pings.
        """
        beginning, error = beginning_of(body), error_event(closed(), api_of(scope))
        waits = False  # whether pings were sent
        for _ in range(_ATTEMPTS):
            messages = self._model.remote(scope, body, beginning=beginning)
            begun = False
            try:
                head = await anext(messages)
                if not waits:
                    yield head
                elif head[0] != HTTPStatus.OK:
                    break
                async for part in messages:
                    begun = begun or not are_pings(part)
                    waits = True
                    yield part
                return
            except RayActorError:
                if begun:  # no other replica can continue it; only streams have several parts
                    break
            finally:
                messages.cancel()
        if waits:
            yield error


async def _body(first: bytes, parts: AsyncGenerator[Head | bytes, None]) -> AsyncIterator[bytes]:
    """The rest of a response."""
    async with aclosing(parts):
        yield first
        async for part in parts:
            assert isinstance(part, bytes)
            yield part


def deployment(
    model: str | os.PathLike[str],
    *,
    num_replicas: int = 1,
    num_cpus: float = 1,
    num_gpus: float = 0,
    grace: float = 30,
    server: Mapping[str, Any] | None = None,
    **generator: Any,
) -> serve.Application:
    """Create the server of `h2o-cpp serve` as an application for ray.serve.run.

    Turns of a conversation go to the same replica, which has them in its prefix cache. If a replica
    dies before it answers, another one is tried, up to three times in all. A stream with more than
    pings ends with an error event.

    model: as for Generator; must exist on every node.
    num_replicas: each loads the model and has its own Engine and queue.
    num_cpus, num_gpus: per replica; sets its threads, and the device if it has a GPU.
    grace: seconds for requests in progress when a replica stops.
    server: arguments of h2o_cpp.serve.app.create_app: name, api_key, max_queue and so on.
    generator: options of Generator.
    """
    settings = dict(server or {})
    replicas = serve.deployment(Model).options(
        num_replicas=num_replicas,
        max_ongoing_requests=_NO_LIMIT,
        graceful_shutdown_timeout_s=grace,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus},
        request_router_config=RequestRouterConfig(request_router_class=BeginningRouter),
    )
    front = serve.deployment(Front).options(
        max_ongoing_requests=_NO_LIMIT,
        graceful_shutdown_timeout_s=grace,
        # On the head node, without which there is no cluster.
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
    )
    return front.bind(
        replicas.bind(os.fspath(model), settings, actor_options(num_cpus, num_gpus, generator)),
        settings.get("max_body_bytes", MAX_BODY_BYTES),
    )


def application(args: Mapping[str, Any]) -> serve.Application:
    """deployment(**args) for Serve's command line and configuration files.

    serve run h2o_cpp.ray:application model=model.gguf num_replicas=4 hh=0.2
    """
    return deployment(**{name: _value(value) for name, value in args.items()})


def _value(given: Any) -> Any:
    """A command-line value: JSON if it is valid, else text."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return given
