"""GET /v1/models, and llama.cpp's /props and /slots: models and their sequences."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from h2o_cpp import __version__
from h2o_cpp.serve.catalog import Entry
from h2o_cpp.serve.endpoint import CatalogOf
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


@router.get("/v1/models")
async def list_models(catalog: CatalogOf) -> ModelList:
    """The served models; loaded ones with their limits."""
    return ModelList(data=[_model(entry) for entry in catalog.entries.values()])


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, catalog: CatalogOf) -> Model:
    """A served model."""
    return _model(catalog.find(name))


def _model(entry: Entry) -> Model:
    if entry.service is None:
        return Model(id=entry.name, created=entry.created)
    return entry.service.model


@router.get("/props")
async def properties(request: Request, catalog: CatalogOf) -> Properties:
    """Properties of a model, named by ?model=NAME."""
    service = await catalog.take(request.query_params.get("model"))
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
async def slots(request: Request, catalog: CatalogOf) -> list[Slot]:
    """The sequences of a model, named by ?model=NAME."""
    service = await catalog.take(request.query_params.get("model"))
    catalog.give_back(service)
    n_active = service.engine.stats().n_active
    return [
        Slot(id=i, n_ctx=service.generator.n_ctx, is_processing=i < n_active)
        for i in range(service.generator.max_sequences)
    ]
