"""Parsing and validating request bodies, and their description in the OpenAPI document."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.types import Receive, Scope, Send

from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.schema import UNKNOWN_FIELD

# The cost of parsing depends on the number of values rather than bytes. These limits exceed any
# conversation or batch of token ids that fits in a context.
_MAX_MEMBERS = 2**16  # arrays, objects and keys
_MAX_VALUES = 2**18
_SCAN_BYTES = 8 * 2**10  # shorter bodies are not checked

_WITHOUT_V1 = ("/chat/completions", "/responses", "/models")

_models: list[type[BaseModel]] = []  # of request bodies

_SCHEMAS = "#/components/schemas/{model}"

_Request = TypeVar("_Request", bound=BaseModel)


def parse(model: type[_Request], body: bytes) -> _Request:
    """Parse a request, regardless of its Content-Type. Raises ApiError."""
    if len(body) > _SCAN_BYTES:
        _check_counts(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error) from None


def check(model: type[_Request], values: Any) -> _Request:
    """Validate a request given as a dict. Raises ApiError."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _invalid(error) from None


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of an endpoint that takes this model."""
    _models.append(model)
    schema = {"$ref": _SCHEMAS.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class Api(FastAPI):
    """A FastAPI application that documents the bodies parsed by parse()."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; some paths also work without /v1, as in llama.cpp.

        HEAD is answered as GET; the server leaves the body out.
        """
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        if scope["type"] == "http" and scope["path"] in _WITHOUT_V1:
            scope = {**scope, "path": f"/v1{scope['path']}"}
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        is_new = self.openapi_schema is None
        document: dict[str, Any] = super().openapi()
        if is_new:
            models: Any = [(model, "validation") for model in dict.fromkeys(_models)]
            _, found = models_json_schema(models, ref_template=_SCHEMAS)
            document["components"]["schemas"] |= found["$defs"]
        return document


def _check_counts(body: bytes) -> None:
    """Reject bodies that are slow to parse, without parsing them and mostly without the GIL."""
    plain = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    strings = np.logical_xor.accumulate(plain == ord('"'))
    rest = plain[~strings]
    if sum(np.count_nonzero(rest == ord(c)) for c in "{[:") > _MAX_MEMBERS:
        raise ApiError(400, f"the body has more than {_MAX_MEMBERS} arrays, objects and keys")
    if np.count_nonzero(rest == ord(",")) > _MAX_VALUES:
        raise ApiError(400, f"the body has more than {_MAX_VALUES} values")


def _invalid(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == UNKNOWN_FIELD:
        place.append(first["ctx"]["name"])
    param = ".".join(place) or None
    message = first["msg"] if param is None else f"{param}: {first['msg']}"
    return ApiError(400, message, param=param)
