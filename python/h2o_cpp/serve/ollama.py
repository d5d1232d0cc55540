"""Ollama's API: /api/chat, generate, embed, embeddings, show, tags, ps and version."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from h2o_cpp import __version__
from h2o_cpp.generation.embedding import unit_length
from h2o_cpp.reply import Content, Reasoning
from h2o_cpp.serve.conversation import submit_chat
from h2o_cpp.serve.embeddings import EmbeddingResponse, vectors
from h2o_cpp.serve.endpoint import CatalogOf, post
from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.generation_response import GenerationResponse
from h2o_cpp.serve.ollama_requests import (
    OllamaChatRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    ShowRequest,
)
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.parsing import check
from h2o_cpp.serve.requests import ChatRequest, CompletionRequest
from h2o_cpp.serve.service import Service


class OllamaError(BaseModel):
    """The body of an error."""

    error: str


router = APIRouter(
    prefix="/api", responses={"4XX": {"model": OllamaError}, "5XX": {"model": OllamaError}}
)

_LINES: dict[int | str, dict[str, Any]] = {
    200: {"description": "A line for each piece", "content": {"application/x-ndjson": {}}}
}


@router.get("/tags")
async def tags(catalog: CatalogOf) -> dict[str, Any]:
    """The served models."""
    return {
        "models": [_tag(one.name, one.created, one.n_bytes) for one in catalog.entries.values()]
    }


@router.get("/ps")
async def loaded(catalog: CatalogOf) -> dict[str, Any]:
    """The loaded models."""
    loaded = (one for one in catalog.entries.values() if one.service is not None)
    return {"models": [_tag(one.name, one.created, one.n_bytes) for one in loaded]}


@router.get("/version")
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}


@post(router, "/chat", OllamaChatRequest, responses=_LINES, quick=False)
def chat(service: Service, body: OllamaChatRequest) -> _Lines | OllamaAnswer:
    """Answer the last message; without one, load the model, or unload it if keep_alive is 0."""
    if body.is_empty:
        return _loaded(service, body, message={"role": "assistant", "content": ""})
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    messages = [message.plain() for message in body.messages]
    fields = body.own(service.max_tokens)
    request = check(ChatRequest, {**fields, "messages": messages, "tools": tools})
    outputs = submit_chat(service, request, truncate=body.truncate)
    return _Lines(service.name, outputs, stream=body.stream, chat=True)


@post(router, "/generate", OllamaGenerateRequest, responses=_LINES, quick=False)
def generate(service: Service, body: OllamaGenerateRequest) -> _Lines | OllamaAnswer:
    """Answer or continue a prompt; without one, load the model, or unload it if keep_alive is 0."""
    if body.is_empty:
        return _loaded(service, body, response="")
    fields = body.own(service.max_tokens)
    if body.raw or service.template is None:
        fields.pop("chat_template_kwargs", None)
        fields.pop("reasoning_effort", None)
        request = check(CompletionRequest, {**fields, "prompt": body.prompt})
        limit = fields.get("max_tokens")
        outputs = service.submit([body.prompt], request, max_tokens=limit)
    else:
        messages = [{"role": "system", "content": body.system}] if body.system else []
        messages.append({"role": "user", "content": body.prompt})
        outputs = submit_chat(service, check(ChatRequest, {**fields, "messages": messages}))
    return _Lines(service.name, outputs, stream=body.stream, chat=False)


@post(router, "/embed", OllamaEmbedRequest)
def embed(service: Service, body: OllamaEmbedRequest) -> EmbeddingResponse | OllamaEmbeddings:
    """Embed each text; without one, load the model."""
    if not body.input:
        return OllamaEmbeddings(model=service.name, embeddings=[])
    texts = [body.input] if isinstance(body.input, str) else body.input
    outputs = service.embed(texts, "mean", truncate=body.truncate)
    return _Embeddings(service, outputs, body.dimensions)


@post(router, "/embeddings", OllamaEmbeddingRequest)
def embed_one(service: Service, body: OllamaEmbeddingRequest) -> EmbeddingResponse | OllamaVector:
    """Embed one text: the older form of /api/embed."""
    if not body.prompt:
        return OllamaVector(embedding=[])
    return _Embedding(service, service.embed([body.prompt], "mean"))


@post(router, "/show", ShowRequest)
def show(service: Service, body: ShowRequest) -> dict[str, Any]:
    """A model's template, context and capabilities."""
    template = service.template
    capabilities = ["completion", "embedding"]
    if template is not None and template.has_tools and template.format.parse is not None:
        capabilities.append("tools")
    if template is not None and template.format.think is not None:
        capabilities.append("thinking")
    return {
        "template": "" if template is None else template.source,
        "details": _DETAILS,
        "model_info": {"general.context_length": service.generator.n_ctx},
        "capabilities": capabilities,
    }


class OllamaAnswer(BaseModel):
    """One line of a streamed answer, or the complete answer."""

    model_config = {"extra": "allow"}

    model: str
    created_at: str
    done: bool


def _loaded(service: Service, body: OllamaRequest, **fields: Any) -> OllamaAnswer:
    """The answer to a request that only loads or unloads the model."""
    fields["done_reason"] = "unload" if body.unloads else "load"
    return OllamaAnswer(model=service.name, created_at=_now(), done=True, **fields)


class _Lines(GenerationResponse):
    stream_type = "application/x-ndjson"

    def __init__(self, model: str, outputs: list[Output], *, stream: bool, chat: bool) -> None:
        super().__init__(outputs, stream=stream)
        self._model, self._chat = model, chat

    def complete(self, outputs: list[Output]) -> OllamaAnswer:
        return self._line(outputs[0], outputs[0].ended.text)

    def event(self, output: Output, piece: str) -> bytes:
        """A line of JSON, unless the piece adds nothing."""
        line = self._line(output, piece)
        return line.model_dump_json().encode() + b"\n" if line.done or line.model_extra else b""

    def end(self) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        return error.body("/api/").encode() + b"\n"

    def _line(self, output: Output, piece: str) -> OllamaAnswer:
        n_before = len(output.reply.calls)
        parts = output.parts(piece)
        content = "".join(part.text for part in parts if isinstance(part, Content))
        thinking = "".join(part.text for part in parts if isinstance(part, Reasoning))
        fields: dict[str, Any] = {}
        calls = [
            {
                "id": output.call_id(i),
                "function": {"name": c.name, "arguments": json.loads(c.arguments)},
            }
            for i, c in enumerate(output.reply.calls)
        ][n_before:]
        if parts or output.generation is not None:
            message: dict[str, Any] = {"content" if self._chat else "response": content}
            if thinking:
                message["thinking"] = thinking
            if calls:
                message["tool_calls"] = calls
            fields = {"message": {"role": "assistant", **message}} if self._chat else message
        if (ended := output.generation) is not None:
            prompt, decode = int(ended.prompt_seconds * 1e9), int(ended.decode_seconds * 1e9)
            fields |= {
                "done_reason": "length" if output.finish_reason == "length" else "stop",
                "total_duration": prompt + decode,
                "load_duration": 0,
                "prompt_eval_count": len(output.prompt),
                "prompt_eval_duration": prompt,
                "eval_count": ended.completion_tokens,
                "eval_duration": decode,
            }
        done = output.generation is not None
        return OllamaAnswer(model=self._model, created_at=_now(), done=done, **fields)


class OllamaEmbeddings(BaseModel):
    """The embeddings of all texts."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0  # nanoseconds
    load_duration: int = 0
    prompt_eval_count: int = 0


class _Embeddings(EmbeddingResponse):
    def __init__(self, service: Service, outputs: list[Output], dimensions: int | None) -> None:
        super().__init__(service, outputs)
        self._dimensions = dimensions or None

    def complete(self, outputs: list[Output]) -> OllamaEmbeddings:
        n, _ = self._outputs.count_tokens()
        found = unit_length(vectors(outputs)[:, : self._dimensions])
        return OllamaEmbeddings(
            model=self._name,
            embeddings=found.tolist(),
            total_duration=int(max(output.ended.prompt_seconds for output in outputs) * 1e9),
            prompt_eval_count=n,
        )


class OllamaVector(BaseModel):
    """One embedding."""

    embedding: list[float]


class _Embedding(EmbeddingResponse):
    def complete(self, outputs: list[Output]) -> OllamaVector:
        return OllamaVector(embedding=vectors(outputs)[0].tolist())


_DETAILS = {
    "parent_model": "",
    "format": "gguf",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}


def _tag(name: str, created: int, n_bytes: int) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(created, timezone.utc).isoformat(),
        "size": n_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(),  # of the name, so that no file is read
        "details": _DETAILS,
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()
