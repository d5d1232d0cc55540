"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from h2o_cpp.generation.request import ContextFullError
from h2o_cpp.serve.responses import ErrorDetail, ErrorResponse


class ApiError(Exception):
    """A request that is not answered, and why."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        """`status` is HTTP's; `param` the field that it is about."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> str:
        """JSON in ASCII: a message may quote what was sent, even half of a surrogate pair."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        detail = ErrorDetail(message=str(self), type=kind, param=self.param, code=self.code)
        return json.dumps(ErrorResponse(error=detail).model_dump())

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The complete response."""
        return Response(self.body(), self.status, headers, "application/json")


def refusal(error: ValueError) -> ApiError:
    """Of what the Engine refuses."""
    code = "context_length_exceeded" if isinstance(error, ContextFullError) else None
    return ApiError(400, str(error), code=code)


def closed() -> ApiError:
    """The server is about to end."""
    return ApiError(503, "the server is not taking requests", code="unavailable")


def internal_error() -> ApiError:
    """What nobody has foreseen."""
    return ApiError(500, "internal error")


def add_handlers(app: FastAPI) -> None:
    """Every error becomes an ErrorResponse."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response({"Retry-After": "1"} if error.status == 429 else None)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        message = first["msg"] if param is None else f"{param}: {first['msg']}"
        return ApiError(400, message, param=param).response()

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, str(error.detail)).response(error.headers)

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, __: Exception) -> Response:
        return internal_error().response()
