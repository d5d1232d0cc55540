"""The common part of endpoints that run a model: parse the body, load the model, submit."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel

from h2o_cpp.generation.constraint_process import CompilingError
from h2o_cpp.serve.catalog import Catalog
from h2o_cpp.serve.errors import ApiError, closed
from h2o_cpp.serve.generation_response import OutputsResponse
from h2o_cpp.serve.metrics import Times
from h2o_cpp.serve.openai_requests import ModelRequest
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.schema import body_of, parse
from h2o_cpp.serve.service import Service


async def _catalog(request: Request) -> Catalog:  # async, or FastAPI would use a thread
    catalog: Catalog = request.app.state.catalog
    return catalog


CatalogOf = Annotated[Catalog, Depends(_catalog)]

_Body = TypeVar("_Body", bound=ModelRequest)
_Submit = Callable[[Service, _Body], object]


class _Route(APIRoute):
    """A route that FastAPI documents only: its function takes a request and returns a response."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


async def _submitted(
    request: Request,
    catalog: Catalog,
    n_bytes: int,
    job: Callable[[], object],
    *,
    quick: bool,
    grammar: bool,
) -> Any:
    """The result of a job, again after its grammar has been compiled in another process."""

    async def goes_on() -> bool:
        return not catalog.closed and not await request.is_disconnected()

    while True:
        try:
            return await catalog.workers.run(n_bytes, job, quick=quick, grammar=grammar)
        except CompilingError as compiling:
            if not await compiling.wait(goes_on):
                left = ApiError(499, "the client has left")
                raise (closed() if catalog.closed else left) from None


def _response(answer: object) -> Response:
    """The response with an answer: a model of pydantic, or what JSON has."""
    if isinstance(answer, BaseModel):
        return Response(answer.model_dump_json(by_alias=True), media_type="application/json")
    return JSONResponse(answer)


def _end(request: Request, catalog: Catalog, service: Service, outputs: Sequence[Output]) -> None:
    """Measure the outputs of a response that has ended, and give its model back."""
    state = request.app.state
    for output in outputs:
        if output.generation is not None:
            times = Times.of(output)
            state.metrics.observe(service.name, output, times)
            if state.telemetry is not None:
                state.telemetry.observe(service.name, request.url.path, output, times)
    catalog.give_back(service)


def post(
    router: APIRouter,
    path: str,
    model: type[_Body],
    *,
    quick: bool = True,
    prepare: Callable[[Request, _Body], None] = lambda request, body: None,
    unloaded: Callable[[str, _Body], object] | None = None,
    **route: Any,
) -> Callable[[_Submit[_Body]], _Submit[_Body]]:
    """A decorator that makes an endpoint from a function of a model and a body.

    quick: for small bodies without a grammar, the function is faster than switching to a thread.
    prepare: called with the parsed body.
    unloaded: responds to a request to unload a model of this name that is not loaded.
    route: as for APIRouter.post.
    """

    def add(submit: _Submit[_Body]) -> _Submit[_Body]:
        async def respond(request: Request) -> Response:
            catalog = await _catalog(request)
            sent = await request.body()
            body = await catalog.workers.run(len(sent), partial(parse, model, sent))
            prepare(request, body)
            if unloaded is not None and body.unloads:
                entry = catalog.find(body.model)
                if entry.service is None:
                    return _response(unloaded(entry.name, body))
            service = await catalog.take(body.model)
            job = partial(submit, service, body)
            try:
                response = await _submitted(
                    request, catalog, len(sent), job, quick=quick, grammar=body.is_constrained
                )
            except BaseException:
                catalog.give_back(service)
                raise
            if isinstance(response, OutputsResponse):
                response.on_end = partial(_end, request, catalog, service)
                return response
            catalog.give_back(service)
            if body.unloads:
                await catalog.unload(body.model)
            return _response(response)

        router.add_api_route(
            path,
            respond,
            methods=["POST"],
            route_class_override=_Route,
            name=submit.__name__,
            description=submit.__doc__,
            openapi_extra=body_of(model),
            **route,
        )
        return submit

    return add
