"""GET /v1/models: the served models, for OpenAI's and Anthropic's clients."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from h2o_cpp.serve.catalog import Entry
from h2o_cpp.serve.endpoint import CatalogOf
from h2o_cpp.serve.errors import api_of
from h2o_cpp.serve.openai_responses import Model, ModelList

router = APIRouter()


class AnthropicModel(BaseModel):
    """A served model, for Anthropic's clients."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"


class AnthropicModels(BaseModel):
    """All served models, on one page."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False


@router.get("/v1/models")
async def list_models(request: Request, catalog: CatalogOf) -> ModelList | AnthropicModels:
    """The served models; loaded ones with their limits. Anthropic's clients get their own form."""
    entries = [*catalog.entries.values()]
    if api_of(request.scope) != "Anthropic":
        return ModelList(data=[_model(entry) for entry in entries])
    data = [_anthropic_model(entry) for entry in entries]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return AnthropicModels(data=data, first_id=first, last_id=last)


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, request: Request, catalog: CatalogOf) -> Model | AnthropicModel:
    """A served model."""
    entry = catalog.find(name)
    return _anthropic_model(entry) if api_of(request.scope) == "Anthropic" else _model(entry)


def _anthropic_model(entry: Entry) -> AnthropicModel:
    created = datetime.fromtimestamp(entry.created, timezone.utc)
    return AnthropicModel(id=entry.name, display_name=entry.name, created_at=created)


def _model(entry: Entry) -> Model:
    if entry.service is None:
        return Model(id=entry.name, created=entry.created)
    return entry.service.model
