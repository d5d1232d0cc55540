"""What endpoints need. None of it blocks, so it is asynchronous: other functions run in threads."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from h2o_cpp.serve.service import Service


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceOf = Annotated[Service, Depends(_service)]

# For the OpenAPI document; Guard asks for the key.
bearer = Depends(HTTPBearer(auto_error=False, description="the server's API key"))
