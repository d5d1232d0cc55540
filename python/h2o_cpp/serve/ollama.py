"""Ollama's endpoints, /api/...: chat, generate, embed, and what models there are."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from h2o_cpp import __version__
from h2o_cpp.reply import Content, Reasoning
from h2o_cpp.serve.conversation import submit_chat
from h2o_cpp.serve.dependencies import CatalogOf
from h2o_cpp.serve.embeddings import EmbeddingResponse, vectors
from h2o_cpp.serve.endpoint import post
from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.generation_response import GenerationResponse
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.parsing import check
from h2o_cpp.serve.requests import (
    ChatRequest,
    CompletionRequest,
    ModelRequest,
    Sampling,
    ToolDefinition,
)
from h2o_cpp.serve.schema import Schema
from h2o_cpp.serve.service import Service


class OllamaError(BaseModel):
    """What every answer but 2xx is."""

    error: str


router = APIRouter(
    prefix="/api", responses={"4XX": {"model": OllamaError}, "5XX": {"model": OllamaError}}
)

_LINES: dict[int | str, dict[str, Any]] = {
    200: {"description": "A line for each piece", "content": {"application/x-ndjson": {}}}
}


class Options(Sampling):
    """How to sample. What is about the machine is ignored."""

    ignored = (
        *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap"),
    )
    num_predict: int | None = Field(None, ge=-2, lt=2**31, description="-1: as many as may be")

    def generation(self) -> dict[str, Any]:
        """As the fields of our own requests."""
        options = self.model_dump(exclude_unset=True, exclude={"num_predict"})
        if self.num_predict is not None and self.num_predict > 0:
            options["max_tokens"] = self.num_predict
        return options


class OllamaRequest(ModelRequest):
    """What its requests have in common."""

    ignored = ("keep_alive",)
    stream: bool = Field(True, description="a line of JSON for each piece")
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        None, description="json: any object; or a schema"
    )
    think: bool | Literal["low", "medium", "high"] | None = Field(
        None, description="for the chat template"
    )

    def own(self) -> dict[str, Any]:
        """As the fields of a chat."""
        fields: dict[str, Any] = {} if self.options is None else self.options.generation()
        fields["stream"] = self.stream
        if self.format:
            fields["guided_json"] = {"type": "object"} if self.format == "json" else self.format
        if isinstance(self.think, bool):
            fields["chat_template_kwargs"] = {"enable_thinking": self.think}
        elif self.think is not None:
            fields["reasoning_effort"] = self.think
        return fields


class OllamaFunction(Schema):
    """What the assistant has called."""

    ignored = ("index",)
    name: str
    arguments: dict[str, Any]


class OllamaCall(Schema):
    """That it has."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(Schema):
    """A message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """As of a chat."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_name is not None:
            message["name"] = self.tool_name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call{i:05}",
                    "function": {
                        "name": call.function.name,
                        "arguments": json.dumps(call.function.arguments),
                    },
                }
                for i, call in enumerate(self.tool_calls)
            ]
        return message


class OllamaChatRequest(OllamaRequest):
    """Answer the last message of a conversation."""

    messages: Annotated[list[OllamaMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """Answer a prompt, or continue it, if it is raw or there is no chat template."""

    prompt: str = Field(min_length=1)
    system: str | None = None
    raw: bool = False
    suffix: Annotated[str, Field(max_length=0)] | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None


class OllamaEmbedRequest(ModelRequest):
    """One text or several."""

    ignored = ("truncate", "keep_alive", "options")
    input: str | Annotated[list[str], Field(min_length=1, fail_fast=True)]


class ShowRequest(ModelRequest):
    """Which model."""

    ignored = ("verbose",)


@router.get("/tags")
async def tags(catalog: CatalogOf) -> dict[str, Any]:
    """The models there are."""
    return {
        "models": [_tag(one.name, one.created, one.n_bytes) for one in catalog.entries.values()]
    }


@router.get("/ps")
async def loaded(catalog: CatalogOf) -> dict[str, Any]:
    """Those that are loaded."""
    return {"models": [_tag(one.name, one.created, 0) for one in catalog.loaded]}


@router.get("/version")
async def version() -> dict[str, str]:
    """Of this server."""
    return {"version": __version__}


@post(router, "/chat", OllamaChatRequest, responses=_LINES, quick=False)
def chat(service: Service, body: OllamaChatRequest) -> _Lines:
    """Answer the last message."""
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    messages = [message.plain() for message in body.messages]
    request = check(ChatRequest, {**body.own(), "messages": messages, "tools": tools})
    return _Lines(service.name, submit_chat(service, request), stream=body.stream, chat=True)


@post(router, "/generate", OllamaGenerateRequest, responses=_LINES, quick=False)
def generate(service: Service, body: OllamaGenerateRequest) -> _Lines:
    """Answer or continue a prompt."""
    if body.raw or service.template is None:
        fields = body.own()
        fields.pop("chat_template_kwargs", None)
        fields.pop("reasoning_effort", None)
        request = check(CompletionRequest, {**fields, "prompt": body.prompt})
        limit = fields.get("max_tokens")
        outputs = service.submit([body.prompt], request, max_tokens=limit)
    else:
        messages = [{"role": "system", "content": body.system}] if body.system else []
        messages.append({"role": "user", "content": body.prompt})
        outputs = submit_chat(service, check(ChatRequest, {**body.own(), "messages": messages}))
    return _Lines(service.name, outputs, stream=body.stream, chat=False)


@post(router, "/embed", OllamaEmbedRequest)
def embed(service: Service, body: OllamaEmbedRequest) -> EmbeddingResponse:
    """Embed each text."""
    texts = [body.input] if isinstance(body.input, str) else body.input
    return _Embeddings(service, service.embed(texts, "mean"))


@post(router, "/show", ShowRequest)
def show(service: Service, body: ShowRequest) -> dict[str, Any]:
    """What a model is and can do."""
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
    """A line of an answer, or all of it."""

    model_config = {"extra": "allow"}

    model: str
    created_at: str
    done: bool


class _Lines(GenerationResponse):
    stream_type = "application/x-ndjson"

    def __init__(self, model: str, outputs: list[Output], *, stream: bool, chat: bool) -> None:
        super().__init__(outputs, stream=stream)
        self._model, self._chat = model, chat

    def complete(self, outputs: list[Output]) -> OllamaAnswer:
        """In one object."""
        return self._line(outputs[0], outputs[0].ended.text)

    def event(self, output: Output, piece: str) -> bytes:
        """A line, if there is anything to say."""
        line = self._line(output, piece)
        return line.model_dump_json().encode() + b"\n" if line.done or line.model_extra else b""

    def end(self) -> bytes:
        """The last line has said it."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """A line, too."""
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
            said: dict[str, Any] = {"content" if self._chat else "response": content}
            if thinking:
                said["thinking"] = thinking
            if calls:
                said["tool_calls"] = calls
            fields = {"message": {"role": "assistant", **said}} if self._chat else said
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
    """Of all texts."""

    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


class _Embeddings(EmbeddingResponse):
    def complete(self, outputs: list[Output]) -> OllamaEmbeddings:
        """One for each text."""
        n, _ = self._outputs.count_tokens()
        return OllamaEmbeddings(
            model=self._name, embeddings=vectors(outputs).tolist(), prompt_eval_count=n
        )


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
        "digest": hashlib.sha256(name.encode()).hexdigest(),  # of the name: files are not read
        "details": _DETAILS,
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()
