"""The OpenAI server as a Ray Serve application: replicas of the model, and a front before them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
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
from h2o_cpp.serve.app import MAX_BODY_BYTES, create_app
from h2o_cpp.serve.errors import ApiError, closed

Head = tuple[int, list[tuple[bytes, bytes]]]  # status and headers

_ATTEMPTS = 3  # a request that kills replicas must not kill all of them
_NO_LIMIT = 100_000  # the queue of each replica's Engine says 429, as without Ray
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")


class Model:
    """A replica: the application of `h2o-cpp serve`, asked by a Front."""

    def __init__(self, model: str, server: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """server: arguments of create_app; options: of Generator."""
        generator = Generator(model, **options)
        self._app = create_app(generator, **{"name": generator.path.stem, **server})
        self._catalog = self._app.state.catalog
        self._running = self._catalog.run()
        self._running.__enter__()

    def check_health(self) -> None:
        """Raises RuntimeError when nothing can be computed any more; Ray then starts another."""
        if self._catalog.closed:
            raise RuntimeError("the Engine is closed")

    async def answer(
        self, scope: Scope, body: bytes, *, beginning: str = ""
    ) -> AsyncIterator[Head | bytes]:
        """What the application sends for a request: status and headers, and then the body.

        Parts that are there at once come together, as each costs more than a token. To cancel it is
        to disconnect. `beginning` is for the router.
        """
        messages: asyncio.Queue[Message] = asyncio.Queue()
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()  # the client stays until this is cancelled
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
            await task  # raises what the application did
        finally:
            task.cancel()


class Front:
    """Passes requests to a replica, and to another one if that dies before it answers."""

    def __init__(self, model: DeploymentHandle, max_body_bytes: int) -> None:
        self._model = model.options(method_name="answer", stream=True)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """The replica's answer, from its first bytes on as they come."""
        if request.url.path.endswith("/metrics"):
            return ApiError(404, "each replica has metrics of its own; ask Ray for its").response()
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > self._max_body_bytes:
                break  # the replica refuses it
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        prefix: str = request.scope.get("root_path", "")  # the application's route_prefix
        scope["path"] = request.scope["path"].removeprefix(prefix)
        scope["raw_path"] = scope["path"].encode()
        beginning = beginning_of(body)
        for _ in range(_ATTEMPTS):
            messages = self._model.remote(scope, body, beginning=beginning)
            try:
                (status, headers), first = await anext(messages), await anext(messages)
            except RayActorError:
                continue
            except BaseException:
                messages.cancel()
                raise
            response = StreamingResponse(_body(first, messages), status)
            response.raw_headers = list(headers)
            return response
        return closed().response()


async def _body(first: bytes, messages: Any) -> AsyncIterator[bytes]:
    """Of a response that has begun, which no other replica can continue."""
    try:
        yield first
        async for part in messages:
            yield part
    except RayActorError:  # only streams have more than one part
        yield f"data: {closed().body()}\n\n".encode()
    finally:
        messages.cancel()


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
    """The server of `h2o-cpp serve` as an application for ray.serve.run.

    Turns of a conversation go to the same replica, where the prefix cache has what it has read. A
    request that was not answered yet when its replica died is answered by another replica, up to
    three times. A stream that had begun ends with an error event.

    model: as for Generator, found on every node.
    num_replicas: how many load it, each with an Engine and a queue of its own.
    num_cpus, num_gpus: of each; it has as many threads, and computes on the GPU it has.
    grace: seconds for sequences to end when a replica is told to stop.
    server: arguments of h2o_cpp.serve.app.create_app: name, api_key, max_queue and so on.
    generator: options of Generator; max_sequences is 8.
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
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(
        replicas.bind(os.fspath(model), settings, actor_options(num_cpus, num_gpus, generator)),
        settings.get("max_body_bytes", MAX_BODY_BYTES),
    )


def application(args: Mapping[str, Any]) -> serve.Application:
    """deployment(**args) for Serve's command and its configuration files.

    serve run h2o_cpp.ray:application model=model.gguf num_replicas=4 hh=0.2
    """
    return deployment(**{name: _value(value) for name, value in args.items()})


def _value(given: Any) -> Any:
    """What a command line spells as text: JSON where it is JSON."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return given
