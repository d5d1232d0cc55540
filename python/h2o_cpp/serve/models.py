"""GET /v1/models: what is served."""

from __future__ import annotations

from fastapi import APIRouter

from h2o_cpp.serve.dependencies import ServiceOf
from h2o_cpp.serve.responses import ModelList

router = APIRouter()


@router.get("/v1/models")
async def list_models(service: ServiceOf) -> ModelList:
    """The model that is served."""
    return ModelList(data=[service.model])
