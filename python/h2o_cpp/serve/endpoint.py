"""What endpoints that ask a model have in common: parse the body, find the model, submit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fastapi import Request

from h2o_cpp.serve.catalog import Catalog
from h2o_cpp.serve.generation_response import OutputsResponse
from h2o_cpp.serve.parsing import parse
from h2o_cpp.serve.requests import ModelRequest
from h2o_cpp.serve.service import Service

_Body = TypeVar("_Body", bound=ModelRequest)


async def answer(
    request: Request,
    catalog: Catalog,
    model: type[_Body],
    submit: Callable[[Service, _Body], object],
    *,
    quick: bool = True,
) -> object:
    """What submit() makes of a request. Raises ApiError.

    quick: submit() takes no longer than another thread would cost, if the body is small.
    """
    sent = await request.body()
    body = await catalog.intake.run(len(sent), partial(parse, model, sent))
    service = await catalog.take(body.model)
    try:
        response = await catalog.intake.run(len(sent), partial(submit, service, body), quick=quick)
    except BaseException:
        catalog.give_back(service)
        raise
    if isinstance(response, OutputsResponse):
        response.on_end = partial(catalog.give_back, service)
    else:
        catalog.give_back(service)
    return response
