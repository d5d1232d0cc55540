"""What endpoints need. None of it blocks, so it is asynchronous: other functions run in threads."""

from __future__ import annotations

import secrets
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.service import Service


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceOf = Annotated[Service, Depends(_service)]

_bearer = HTTPBearer(auto_error=False, description="the server's API key")


async def check_key(
    request: Request,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> None:
    """Raises ApiError without the key."""
    key: str = request.app.state.api_key
    # Header values reach us as latin-1, whatever they are.
    given = "" if credentials is None else credentials.credentials
    if not secrets.compare_digest(given.encode("latin-1"), key.encode()):
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
