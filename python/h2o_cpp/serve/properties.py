"""GET /v1/models, and llama.cpp's /props and /slots: models and their sequences."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from h2o_cpp import __version__
from h2o_cpp.serve.catalog import Entry
from h2o_cpp.serve.endpoint import CatalogOf
from h2o_cpp.serve.errors import api_of
from h2o_cpp.serve.responses import Model, ModelLimits, ModelList

router = APIRouter()


class GenerationSettings(BaseModel):
    """Settings of a sequence."""

    n_ctx: int


class Properties(BaseModel):
    """A model's properties."""

    model_alias: str
    model_path: str  # only the file name
    total_slots: int
    default_generation_settings: GenerationSettings
    chat_template: str | None
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    h2o: ModelLimits | None


class Slot(BaseModel):
    """A sequence. Busy ones come first; the numbers are not stable."""

    id: int
    n_ctx: int
    is_processing: bool


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


@router.get("/props")
async def properties(catalog: CatalogOf, model: str | None = None) -> Properties:
    """Properties of a model, named by ?model=NAME."""
    service = await catalog.take(model)
    catalog.give_back(service)
    generator, tokenizer = service.generator, service.generator.tokenizer
    return Properties(
        model_alias=service.name,
        model_path=generator.path.name,
        total_slots=generator.max_sequences,
        default_generation_settings=GenerationSettings(n_ctx=generator.n_ctx),
        chat_template=None if service.template is None else service.template.source,
        bos_token=tokenizer.token_text(tokenizer.bos),
        eos_token=tokenizer.token_text(tokenizer.eos),
        modalities={"vision": False, "audio": False},
        build_info=f"h2o.cpp {__version__}",
        h2o=service.model.h2o,
    )


@router.get("/slots")
async def slots(catalog: CatalogOf, model: str | None = None) -> list[Slot]:
    """The sequences of a model, named by ?model=NAME."""
    service = await catalog.take(model)
    catalog.give_back(service)
    n_active = service.engine.stats().n_active
    return [
        Slot(id=i, n_ctx=service.generator.n_ctx, is_processing=i < n_active)
        for i in range(service.generator.max_sequences)
    ]
