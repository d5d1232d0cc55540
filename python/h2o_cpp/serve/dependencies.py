"""Dependencies of endpoints. They are async because FastAPI runs other functions in threads."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from h2o_cpp.serve.catalog import Catalog


async def _catalog(request: Request) -> Catalog:
    catalog: Catalog = request.app.state.catalog
    return catalog


CatalogOf = Annotated[Catalog, Depends(_catalog)]

# Documents the key in OpenAPI; Guard checks it.
bearer = Depends(HTTPBearer(auto_error=False, description="the server's API key"))
