"""GET /v1/models."""

from __future__ import annotations

from fastapi import APIRouter

from h2o_cpp.serve.dependencies import CatalogOf
from h2o_cpp.serve.responses import Model, ModelList

router = APIRouter()


@router.get("/v1/models")
async def list_models(catalog: CatalogOf) -> ModelList:
    """The served models; loaded ones with their limits."""
    return ModelList(
        data=[
            Model(id=entry.name, created=entry.created)
            if entry.service is None
            else entry.service.model
            for entry in catalog.entries.values()
        ]
    )
