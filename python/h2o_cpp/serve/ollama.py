"""Ollama's API: /api/chat, generate, embed, embeddings, show, tags, ps and version."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from contextlib import suppress
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from h2o_cpp.generation.embedding import unit_length
from h2o_cpp.model.chat_turn import ChatTurn
from h2o_cpp.reply import Reply
from h2o_cpp.serve.catalog import Entry
from h2o_cpp.serve.conversation import submit_chat, submit_turn
from h2o_cpp.serve.embeddings import EmbeddingResponse
from h2o_cpp.serve.endpoint import CatalogOf, post
from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.generation_response import GenerationResponse, json_line
from h2o_cpp.serve.logprobs import chat_logprobs
from h2o_cpp.serve.ollama_requests import (
    OllamaChatRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    ShowRequest,
)
from h2o_cpp.serve.openai_requests import ChatRequest, CompletionRequest
from h2o_cpp.serve.openai_responses import ChatTokenLogprob, LostTokens
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.schema import check
from h2o_cpp.serve.service import Service


class OllamaError(BaseModel):
    """The body of an error."""

    error: str


router = APIRouter(
    prefix="/api", responses={"4XX": {"model": OllamaError}, "5XX": {"model": OllamaError}}
)

_HEAD_BYTES, _N_PARTS, _PART_BYTES = 2**20, 64, 2**16  # read for a digest

_API_VERSION = "0.12.11"  # with log-probabilities

_LINES: dict[int | str, dict[str, Any]] = {
    200: {"description": "A line for each piece", "content": {"application/x-ndjson": {}}}
}


@router.get("/tags")
async def tags(catalog: CatalogOf) -> dict[str, Any]:
    """The served models."""
    return {"models": await _tags([*catalog.entries.values()])}


@router.get("/ps")
async def loaded(catalog: CatalogOf) -> dict[str, Any]:
    """The loaded models."""
    models = []
    entries = [entry for entry in catalog.entries.values() if entry.service is not None]
    for entry, tag in zip(entries, await _tags(entries), strict=True):
        if (service := entry.service) is None:
            continue
        with suppress(RuntimeError):  # it has just been unloaded
            models.append(
                {
                    **tag,
                    "size_vram": 0 if service.backend.startswith("cpu") else entry.n_bytes,
                    "expires_at": "9999-12-31T23:59:59Z",
                    "context_length": service.generator.n_ctx,
                }
            )
    return {"models": models}


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of Ollama whose API this follows; clients check for a minimum."""
    return {"version": _API_VERSION}


async def refused(request: Request) -> None:
    """Explain what this server does not do with models."""
    raise ApiError(
        501,
        f"{request.url.path} is not supported: the models are those that the server was started "
        "with, by --model or --models; h2o-cpp pull downloads others",
    )


for _action in ("pull", "push", "create", "copy", "delete"):
    router.add_api_route(
        f"/{_action}", refused, methods=["POST", "DELETE"], include_in_schema=False
    )


def _empty_chat(name: str, body: OllamaRequest) -> OllamaAnswer:
    return _loaded(name, body, message={"role": "assistant", "content": ""})


def _empty(name: str, body: OllamaRequest) -> OllamaAnswer:
    return _loaded(name, body, response="")


@post(router, "/chat", OllamaChatRequest, responses=_LINES, quick=False, unloaded=_empty_chat)
def chat(service: Service, body: OllamaChatRequest) -> _Lines | OllamaAnswer:
    """Answer the last message; without one, load the model, or unload it if keep_alive is 0."""
    if body.is_empty:
        return _empty_chat(service.name, body)
    tools = [tool.plain() for tool in body.tools or ()]
    messages = [message.plain() for message in body.messages]
    fields = body.chat()
    request = check(ChatRequest, {**fields, "messages": messages, "tools": tools})
    return _Lines(service, submit_chat(service, request), body, chat=True)


@post(router, "/generate", OllamaGenerateRequest, responses=_LINES, quick=False, unloaded=_empty)
def generate(service: Service, body: OllamaGenerateRequest) -> _Lines | OllamaAnswer:
    """Answer or continue a prompt; without one, load the model, or unload it if keep_alive is 0."""
    if body.is_empty:
        return _empty(service.name, body)
    if body.raw and body.context:
        raise ApiError(400, "context is given, but raw is set", param="context")
    if body.suffix:
        outputs = service.fill_in(body.prompt, body.suffix, _completion(body))
        return _Lines(service, outputs, body, chat=False)
    submit = _continue if body.raw or service.template is None else _reply
    return _Lines(service, submit(service, body), body, chat=False, context=not body.raw)


def _continue(service: Service, body: OllamaGenerateRequest) -> list[Output]:
    """Continue the prompt, after the context."""
    if body.system:
        reason = "raw is set" if body.raw else "the model has no chat template"
        message = f"system is given, but {reason}; expected its text in prompt"
        raise ApiError(400, message, param="system")
    request = _completion(body)
    tokenizer = service.generator.tokenizer
    prompt: str | list[int] = body.prompt
    if body.context:
        with service.refusals():
            prompt = body.context + tokenizer.encode(body.prompt, add_special=False, begins=False)
    return service.submit([prompt], request)


def _completion(body: OllamaGenerateRequest) -> CompletionRequest:
    """The equivalent CompletionRequest."""
    fields = body.generation()
    fields["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    fields |= {"prompt": body.prompt, "n_keep": body.n_keep}
    return check(CompletionRequest, {"max_tokens": -1, **fields})


def _reply(service: Service, body: OllamaGenerateRequest) -> list[Output]:
    """Answer the prompt as a message, after the context."""
    messages = [{"role": "user", "content": body.prompt}]
    if body.system and not body.context:
        messages.insert(0, {"role": "system", "content": body.system})
    fields = {**body.chat(), "messages": messages, "n_keep": body.n_keep}
    chat = check(ChatRequest, fields)
    if not body.context:
        return submit_chat(service, chat)
    given = chat.conversation()
    first = {"role": "user", "content": "Hello"}  # before the reply, which is only a place
    template = service.chat_template()
    with service.refusals():
        prompt = template.prompt_after_reply(
            [first], given["messages"], variables=given["variables"]
        )
    tokens = [*body.context, *prompt.tokens]
    return submit_turn(service, chat, ChatTurn(template, prompt._replace(tokens=tokens)))


@post(router, "/embed", OllamaEmbedRequest)
def embed(service: Service, body: OllamaEmbedRequest) -> EmbeddingResponse | OllamaEmbeddings:
    """Embed each text; without one, load the model."""
    if not body.input:
        return OllamaEmbeddings(model=service.name, embeddings=[])
    texts = [body.input] if isinstance(body.input, str) else body.input
    outputs = service.embed(texts, None, truncate=body.truncate)
    dimensions = body.dimensions or None

    def complete(vectors: Any, n_tokens: int) -> OllamaEmbeddings:
        return OllamaEmbeddings(
            model=service.name,
            embeddings=unit_length(vectors[:, :dimensions]).tolist(),
            total_duration=int(max(output.ended.prompt_seconds for output in outputs.all) * 1e9),
            prompt_eval_count=n_tokens,
        )

    return EmbeddingResponse(outputs, complete)


@post(router, "/embeddings", OllamaEmbeddingRequest)
def embed_one(service: Service, body: OllamaEmbeddingRequest) -> EmbeddingResponse | OllamaVector:
    """Embed one text: the older form of /api/embed."""
    if not body.prompt:
        return OllamaVector(embedding=[])
    outputs = service.embed([body.prompt], None, truncate=body.truncate)
    return EmbeddingResponse(
        outputs, lambda vectors, _: OllamaVector(embedding=vectors[0].tolist())
    )


@post(router, "/show", ShowRequest)
def show(service: Service, body: ShowRequest) -> dict[str, Any]:
    """A model's template, context and capabilities."""
    template = service.template
    capabilities = ["embedding"]
    if not service.generator.is_encoder:
        capabilities.insert(0, "completion")
    if template is not None and template.has_tools:
        capabilities.append("tools")
    if template is not None and template.format.think is not None:
        capabilities.append("thinking")
    return {
        "template": "" if template is None else template.source,
        "details": _details(service),
        "model_info": {
            "general.architecture": service.architecture,
            "general.basename": service.name,
            **service.sizes,
            f"{service.architecture}.context_length": service.generator.n_ctx,
        },
        "modified_at": _time(service.created),
        "capabilities": capabilities,
    }


class OllamaAnswer(BaseModel):
    """One line of a streamed answer, or the complete answer."""

    model_config = {"extra": "allow"}

    model: str
    created_at: str
    done: bool


def _loaded(name: str, body: OllamaRequest, **fields: Any) -> OllamaAnswer:
    """The answer to a request that only loads or unloads the model."""
    fields["done_reason"] = "unload" if body.unloads else "load"
    return OllamaAnswer(model=name, created_at=_now(), done=True, **fields)


class _Lines(GenerationResponse):
    api = "Ollama"
    stream_type = "application/x-ndjson"

    def __init__(
        self,
        service: Service,
        outputs: list[Output],
        body: OllamaRequest,
        *,
        chat: bool,
        context: bool = False,
    ) -> None:
        super().__init__(outputs, stream=body.stream)
        self._model, self._chat, self._context = service.name, chat, context
        self._text = "content" if chat else "response"
        self._tokenizer = service.generator.tokenizer if body.logprobs else None

    def complete(self, outputs: list[Output]) -> OllamaAnswer:
        return self._line(outputs[0], outputs[0].ended.text)

    def event(self, output: Output, piece: str) -> bytes:
        """A line of JSON, unless the piece adds nothing."""
        line = self._line(output, piece)
        return json_line(line.model_dump_json()) if line.done or line.model_extra else b""

    def ping(self) -> bytes:
        """A line with an empty piece."""
        return json_line(self._answer_of(self._shown({self._text: ""})).model_dump_json())

    def _line(self, output: Output, piece: str) -> OllamaAnswer:
        n_before = len(output.reply.calls)
        parts = output.parts(piece)
        new = Reply()
        new.add(parts)
        logprobs: list[ChatTokenLogprob] = []
        if self._tokenizer is not None:
            new_logprobs = output.new_logprobs()
            logprobs = chat_logprobs(self._tokenizer, new_logprobs, ids=False).content
        fields: dict[str, Any] = {}
        if parts or logprobs or output.generation is not None:
            message: dict[str, Any] = {self._text: new.content}
            if new.reasoning:
                message["thinking"] = new.reasoning
            if new.calls:
                message["tool_calls"] = [
                    {
                        "id": output.call_id(i),
                        "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                    }
                    for i, call in enumerate(new.calls, n_before)
                ]
            fields = self._shown(message)
        if logprobs:
            fields["logprobs"] = logprobs
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
                "prompt_memory": LostTokens.of(output.prompt_memory).model_dump(),
            }
            if memory := output.message_memory:
                fields["message_memory"] = memory
            if self._context:
                fields["context"] = [*output.prompt, *output.completion.tokens]
        return self._answer_of(fields, done=output.generation is not None)

    def _shown(self, message: dict[str, Any]) -> dict[str, Any]:
        """The fields of a piece of the message."""
        return {"message": {"role": "assistant", **message}} if self._chat else message

    def _answer_of(self, fields: dict[str, Any], *, done: bool = False) -> OllamaAnswer:
        return OllamaAnswer(model=self._model, created_at=_now(), done=done, **fields)


class OllamaEmbeddings(BaseModel):
    """The embeddings of all texts."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0  # nanoseconds
    load_duration: int = 0
    prompt_eval_count: int = 0


class OllamaVector(BaseModel):
    """One embedding."""

    embedding: list[float]


async def _tags(entries: list[Entry]) -> list[dict[str, Any]]:
    return [_tag(entry, await asyncio.to_thread(_digest, entry)) for entry in entries]


def _tag(entry: Entry, digest: str) -> dict[str, Any]:
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": _time(entry.created),
        "size": entry.n_bytes,
        "digest": digest,
        "details": _details(entry.service),
    }


def _digest(entry: Entry) -> str:
    """A hash of the model's file and template."""
    found = hashlib.sha256((entry.template or "").encode(errors="surrogatepass"))
    try:
        state = os.stat(entry.file)
        found.update(_file_digest(entry.file, state.st_size, state.st_mtime_ns))
    except (OSError, ValueError):  # a name
        found.update(entry.file.encode(errors="surrogatepass"))
    return found.hexdigest()


@lru_cache(maxsize=1024)
def _file_digest(file: str, n_bytes: int, _changed: int) -> bytes:
    """A hash of a file's size, beginning and parts, because large files take long to read."""
    found = hashlib.sha256(str(n_bytes).encode())
    with open(file, "rb") as data:
        found.update(data.read(_HEAD_BYTES))
        for i in range(_N_PARTS):
            data.seek(max(n_bytes - _PART_BYTES, 0) * i // (_N_PARTS - 1))
            found.update(data.read(_PART_BYTES))
    return found.digest()


def _details(service: Service | None) -> dict[str, Any]:
    """A model's details; the family only if it is loaded."""
    family = "" if service is None else service.architecture
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()
