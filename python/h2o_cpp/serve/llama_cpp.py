"""llama.cpp's own endpoints, besides completions: state, tokens and templates."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from h2o_cpp.serve.conversation import conversation_of
from h2o_cpp.serve.endpoint import CatalogOf, post
from h2o_cpp.serve.errors import ERRORS, ApiError
from h2o_cpp.serve.llama_cpp_completion import generation_settings
from h2o_cpp.serve.openai_requests import ChatRequest, ModelRequest, Token
from h2o_cpp.serve.openai_responses import BUILD, ModelLimits
from h2o_cpp.serve.schema import ListOf
from h2o_cpp.serve.service import Service

router = APIRouter(responses=ERRORS)


class GenerationSettings(BaseModel):
    """Settings of a sequence, and the defaults of requests."""

    n_ctx: int
    params: dict[str, Any]


class Properties(BaseModel):
    """A model's properties."""

    model_alias: str
    model_path: str  # only the file name
    total_slots: int
    default_generation_settings: GenerationSettings
    chat_template: str | None
    chat_template_tool_use: str | None  # another one for conversations with tools
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


class TokenizeRequest(ModelRequest):
    """A text to tokenize."""

    content: str
    add_special: bool | None = Field(None, description="add the tokens that begin and end a text")
    parse_special: bool | None = Field(
        None, description="parse special tokens in the text (default: true)"
    )
    with_pieces: bool | None = Field(None, description="return the text of each token")


class DetokenizeRequest(ModelRequest):
    """Tokens to detokenize."""

    tokens: ListOf[Token]


class TokenPiece(BaseModel):
    """A token; piece: its text, or its bytes if they are not UTF-8."""

    id: int
    piece: str | list[int]


class Tokenized(BaseModel):
    """The tokens of a text."""

    tokens: list[int] | list[TokenPiece]


class Detokenized(BaseModel):
    """The text of tokens."""

    content: str


class AppliedTemplate(BaseModel):
    """The rendered conversation."""

    prompt: str


@router.get("/props")
async def properties(catalog: CatalogOf, model: str | None = None) -> Properties:
    """Properties of a model, named by ?model=NAME."""
    service = await catalog.take(model)
    catalog.give_back(service)
    generator, tokenizer = service.generator, service.generator.tokenizer
    template = service.template
    return Properties(
        model_alias=service.name,
        model_path=generator.path.name,
        total_slots=generator.max_sequences,
        default_generation_settings=GenerationSettings(
            n_ctx=generator.n_ctx, params=generation_settings(service)
        ),
        chat_template=None if template is None else template.source,
        chat_template_tool_use=None
        if template is None or template.for_tools is template
        else template.for_tools.source,
        bos_token=tokenizer.token_text(tokenizer.bos),
        eos_token=tokenizer.token_text(tokenizer.eos),
        modalities={"vision": False, "audio": False},
        build_info=BUILD,
        h2o=service.limits,
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


@post(router, "/tokenize", TokenizeRequest, response_model=Tokenized)
def tokenize(service: Service, body: TokenizeRequest) -> Tokenized:
    """Tokenize a text of at most max_prompt tokens."""
    tokenizer = service.generator.tokenizer
    with service.refusals():
        tokens = tokenizer.encode(
            body.content,
            add_special=bool(body.add_special),
            parse_special=body.parse_special is not False,
            most=service.max_prompt,
        )
    if not body.with_pieces:
        return Tokenized(tokens=tokens)
    return Tokenized(
        tokens=[TokenPiece(id=token, piece=_piece(service, token)) for token in tokens]
    )


def _piece(service: Service, token: int) -> str | list[int]:
    data = service.generator.tokenizer.token_bytes(token)
    try:
        return data.decode() or service.generator.tokenizer.token_text(token)
    except UnicodeDecodeError:
        return list(data)


@post(router, "/detokenize", DetokenizeRequest, response_model=Detokenized)
def detokenize(service: Service, body: DetokenizeRequest) -> Detokenized:
    """The text of each token, also of special ones, and with the space that begins a text."""
    with service.refusals():
        return Detokenized(content=service.generator.tokenizer.spell(body.tokens))


@post(router, "/apply-template", ChatRequest, response_model=AppliedTemplate, quick=False)
def apply_template(service: Service, body: ChatRequest) -> AppliedTemplate:
    """Render a conversation; special tokens appear as text."""
    template = service.chat_template(tools=bool(body.shown_tools()))
    with service.refusals():
        text = template.text(**conversation_of(service, body))
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ApiError(400, "the conversation is not valid Unicode")
    return AppliedTemplate(prompt=text)
