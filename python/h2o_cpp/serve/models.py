"""GET /v1/models: the served models, for OpenAI's and Anthropic's clients."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from h2o_cpp.serve.catalog import Entry
from h2o_cpp.serve.endpoint import CatalogOf
from h2o_cpp.serve.errors import ERRORS, api_of
from h2o_cpp.serve.openai_responses import Model, ModelList

router = APIRouter(responses=ERRORS)


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
    named = catalog.named
    if api_of(request.scope) != "Anthropic":
        return ModelList(data=[_model(name, entry) for name, entry in named.items()])
    data = [_anthropic_model(name, entry) for name, entry in named.items()]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return AnthropicModels(data=data, first_id=first, last_id=last)


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, request: Request, catalog: CatalogOf) -> Model | AnthropicModel:
    """A served model."""
    entry = catalog.find(name)
    shown = name if name in catalog.named else entry.name
    is_anthropic = api_of(request.scope) == "Anthropic"
    return _anthropic_model(shown, entry) if is_anthropic else _model(shown, entry)


def _anthropic_model(name: str, entry: Entry) -> AnthropicModel:
    created = datetime.fromtimestamp(entry.created, timezone.utc)
    return AnthropicModel(id=name, display_name=name, created_at=created)


def _model(name: str, entry: Entry) -> Model:
    h2o = None if entry.service is None else entry.service.limits
    return Model(id=name, created=entry.created, h2o=h2o)
