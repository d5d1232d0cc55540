"""What endpoints need. None of it blocks, so it is asynchronous: other functions run in threads."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from h2o_cpp.serve.catalog import Catalog


async def _catalog(request: Request) -> Catalog:
    catalog: Catalog = request.app.state.catalog
    return catalog


CatalogOf = Annotated[Catalog, Depends(_catalog)]

# For the OpenAPI document; Guard asks for the key.
bearer = Depends(HTTPBearer(auto_error=False, description="the server's API key"))
