"""Errors in the forms that OpenAI's, Anthropic's and Ollama's clients expect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from h2o_cpp.files.visible_text import shortened
from h2o_cpp.generation.request import ContextFullError

Api = Literal["OpenAI", "Anthropic", "Ollama"]

_JSON = "application/json"
LINGER_SECONDS = 1.0  # before a connection closes, for the client to read an error
_OPENAI = {401: "authentication_error", 429: "rate_limit_error"}  # 401 as in llama.cpp
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ErrorDetail(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of an error."""

    error: ErrorDetail


# The responses of all endpoints in the OpenAPI document.
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse},
    "5XX": {"model": ErrorResponse},
}


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """status: HTTP status; param: the invalid field; details: for Anthropic's clients."""
        super().__init__(shortened(message))
        self.status, self.param, self.code, self.details = status, param, code, details
        self.headers: dict[str, str] = {}
        if status in (429, 503):
            self.headers["Retry-After"] = "1"
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def body(self, api: Api = "OpenAI") -> str:
        """The body as ASCII JSON: a message may quote input with unpaired surrogates."""
        if api == "Ollama":
            return json.dumps({"error": str(self)})
        if api == "Anthropic":
            other = "api_error" if self.status >= 500 else "invalid_request_error"
            detail: dict[str, Any] = {
                "type": _ANTHROPIC.get(self.status, other),
                "message": self.for_anthropic,
            }
            if self.details is not None:
                detail["details"] = self.details
            return json.dumps({"type": "error", "error": detail})
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _OPENAI.get(self.status, other)
        shown = ErrorDetail(message=str(self), type=kind, param=self.param, code=self.code)
        return json.dumps(ErrorResponse(error=shown).model_dump())

    @property
    def for_anthropic(self) -> str:
        """The message for Anthropic's clients."""
        return str(self)

    def response(self, headers: Mapping[str, str] | None = None, api: Api = "OpenAI") -> Response:
        """The complete response."""
        return Response(self.body(api), self.status, {**self.headers, **(headers or {})}, _JSON)


class TooLongError(ApiError):
    """The error for a prompt that is too long; most: the tokens that it may have, if known."""

    def __init__(self, message: str, most: int | None = None) -> None:
        super().__init__(400, message, code="context_length_exceeded")
        self._most = most

    @property
    def for_anthropic(self) -> str:
        """The message in the words by which Anthropic's clients recognize it."""
        if self._most is None:
            return f"prompt is too long: {self}"
        return f"prompt is too long: at least {self._most + 1} tokens > {self._most} maximum"


def api_of(scope: Scope) -> Api:
    """The API whose client made a request; Anthropic's are known by a header on other paths."""
    path: str = scope["path"]
    if path.startswith("/api/"):
        return "Ollama"
    if path.startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope):
        return "Anthropic"
    return "OpenAI"


def refusal(error: ValueError) -> ApiError:
    """The error for a request that the Engine rejects."""
    if isinstance(error, ContextFullError):
        return TooLongError(str(error))
    return ApiError(400, str(error))


def closed() -> ApiError:
    """The error while the server shuts down."""
    return ApiError(503, "the server is not taking requests", code="unavailable")


def internal_error() -> ApiError:
    """The error for an unexpected exception, whose message is only logged."""
    return ApiError(500, "internal error")


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request whose body has not been read, then close the connection.

    Incoming data is discarded for a moment first: closing at once would reset the connection, and
    the client might not receive the answer.
    """
    response = error.response({"Connection": "close"}, api_of(scope))
    start = {"type": "http.response.start", "status": error.status, "headers": response.raw_headers}
    await send(start)
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_drop(receive), LINGER_SECONDS)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop(receive: Receive) -> None:
    while (await receive()).get("more_body"):
        pass


def add_handlers(app: FastAPI) -> None:
    """Turn every exception into an error response."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response(api=api_of(request.scope))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        shown = ApiError(error.status_code, str(error.detail))
        return shown.response(error.headers, api_of(request.scope))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, _: Exception) -> Response:
        return internal_error().response(api=api_of(request.scope))
