"""The common part of endpoints that run a model: parse the body, load the model, submit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPBearer

from h2o_cpp.serve.catalog import Catalog
from h2o_cpp.serve.generation_response import OutputsResponse
from h2o_cpp.serve.openai_requests import ModelRequest
from h2o_cpp.serve.schema import body_of, parse
from h2o_cpp.serve.service import Service


async def _catalog(request: Request) -> Catalog:  # async, or FastAPI would use a thread
    catalog: Catalog = request.app.state.catalog
    return catalog


CatalogOf = Annotated[Catalog, Depends(_catalog)]

# Documents the key in OpenAPI; Guard checks it.
bearer = Depends(HTTPBearer(auto_error=False, description="the server's API key"))

_Body = TypeVar("_Body", bound=ModelRequest)
_Submit = Callable[[Service, _Body], object]


def post(
    router: APIRouter,
    path: str,
    model: type[_Body],
    *,
    quick: bool = True,
    unloaded: Callable[[str, _Body], object] | None = None,
    **route: Any,
) -> Callable[[_Submit[_Body]], _Submit[_Body]]:
    """A decorator that makes an endpoint from a function of a model and a body.

    quick: for small bodies without a grammar, the function is faster than switching to a thread.
    unloaded: responds to a request to unload a model of this name that is not loaded.
    route: as for APIRouter.post.
    """

    def add(submit: _Submit[_Body]) -> _Submit[_Body]:
        async def respond(request: Request, catalog: CatalogOf) -> Any:
            sent = await request.body()
            body = await catalog.workers.run(len(sent), partial(parse, model, sent))
            if unloaded is not None and body.unloads:
                entry = catalog.find(body.model)
                if entry.service is None:
                    return unloaded(entry.name, body)
            service = await catalog.take(body.model)
            job = partial(submit, service, body)
            try:
                response = await catalog.workers.run(
                    len(sent), job, quick=quick and not body.has_form
                )
            except BaseException:
                catalog.give_back(service)
                raise
            if isinstance(response, OutputsResponse):
                response.on_end = partial(catalog.give_back, service)
            else:
                catalog.give_back(service)
                if body.unloads:
                    await catalog.unload(body.model)
            return response

        router.add_api_route(
            path,
            respond,
            methods=["POST"],
            name=submit.__name__,
            description=submit.__doc__,
            openapi_extra=body_of(model),
            **route,
        )
        return submit

    return add
