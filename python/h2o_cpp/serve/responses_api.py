"""POST /v1/responses: OpenAI's Responses API."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel

from h2o_cpp.generation.record import TokenLogprob
from h2o_cpp.serve.blocks import Block, Blocks, Step
from h2o_cpp.serve.conversation import count_tokens, submit_chat
from h2o_cpp.serve.endpoint import post
from h2o_cpp.serve.errors import ERRORS, ApiError
from h2o_cpp.serve.generation_response import EVENTS, GenerationResponse, sse
from h2o_cpp.serve.logprobs import chat_logprobs
from h2o_cpp.serve.openai_responses import IF_THERE, InputTokens, LostTokens, MessageMemory
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.responses_request import FunctionTool, ResponsesRequest, Tool, shown_name
from h2o_cpp.serve.service import Service
from h2o_cpp.serve.stored_responses import StoredResponses, item_id

router = APIRouter(responses=ERRORS)


class ResponseObject(BaseModel):
    """The response, in items."""

    model_config = {"extra": "allow"}

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    message_memory: MessageMemory | None = IF_THERE


async def _stored(request: Request) -> StoredResponses:
    stored: StoredResponses = request.app.state.stored_responses[request.scope["api_key"]]
    return stored


StoredOf = Annotated[StoredResponses, Depends(_stored)]


def _refer(request: Request, body: ResponsesRequest) -> None:
    """Let a request refer to the last responses with its key."""
    body.refer_to(request.app.state.stored_responses[request.scope["api_key"]])


@post(
    router,
    "/v1/responses",
    ResponsesRequest,
    prepare=_refer,
    response_model=ResponseObject,
    responses=EVENTS,
    quick=False,
)
def create_response(service: Service, body: ResponsesRequest) -> _Response:
    """Answer the last message."""
    outputs = submit_chat(service, body.chat())
    return _Response(service, body, outputs)


@post(
    router,
    "/v1/responses/input_tokens",
    ResponsesRequest,
    prepare=_refer,
    response_model=InputTokens,
    quick=False,
)
def count_input_tokens(service: Service, body: ResponsesRequest) -> InputTokens:
    """Count the tokens of a conversation."""
    return InputTokens(input_tokens=count_tokens(service, body.chat()))


@router.get("/v1/responses/{id}", response_model=ResponseObject)
async def retrieve_response(id: str, stored: StoredOf) -> Response:
    """One of the last responses with this key."""
    return Response(stored.response(id), media_type="application/json")


class DeletedResponse(BaseModel):
    """A response that was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


@router.delete("/v1/responses/{id}")
async def delete_response(id: str, stored: StoredOf) -> DeletedResponse:
    """Forget one of the last responses with this key."""
    stored.remove(id)
    return DeletedResponse(id=id)


class InputItems(BaseModel):
    """A part of the items before a response's output."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


@router.get("/v1/responses/{id}/input_items")
async def list_input_items(
    id: str,
    stored: StoredOf,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> InputItems:
    """The items before the output of a response, also those of earlier ones."""
    items = [_listed(item, item_id("in", id, i)) for i, item in enumerate(stored.input(id))]
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    begin = ids.index(after) + 1 if after in ids else 0
    page = items[begin : begin + limit]
    return InputItems(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=begin + limit < len(items),
    )


def _listed(item: dict[str, Any], id: str) -> dict[str, Any]:
    """An item with an id, and with its text in a part."""
    if isinstance(text := item.get("content"), str):
        item = {**item, "content": [{"type": "input_text", "text": text}]}
    return {"id": id, **item}


class _Response(GenerationResponse):
    def __init__(self, service: Service, body: ResponsesRequest, outputs: list[Output]) -> None:
        super().__init__(outputs, stream=body.stream)
        self._model, self._body = service.name, body
        self._tokenizer = service.generator.tokenizer
        self._id, self._created = f"resp_{uuid4().hex}", int(time.time())
        self._blocks = Blocks()
        self._n_events = 0
        self._truncation = body.truncation or service.defaults.truncation
        self._store = body.storing()
        body.input = ""  # may be large
        self._functions = {
            shown_name(namespace, function.name): (namespace, function.name)
            for namespace, function in body.functions()
        }
        given = body.text and body.text.format
        self._format = given.model_dump(by_alias=True) if given else {"type": "text"}

    def complete(self, outputs: list[Output]) -> ResponseObject:
        [output] = outputs
        self._blocks.add_all(output)
        return self._response(output)

    def begin(self) -> bytes:
        """The events with the empty response."""
        response = self._response(None).model_dump()
        return b"".join(
            self._event(kind, response=response)
            for kind in ("response.created", "response.in_progress")
        )

    def event(self, output: Output, piece: str) -> bytes:
        """The events for the items that a piece changes."""
        return b"".join(self._step(step) for step in self._blocks.add(output, piece))

    def end(self) -> bytes:
        """The event with the complete response."""
        response = self._response(self._outputs.all[0])
        return self._event(f"response.{response.status}", response=response.model_dump())

    def failed(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=str(error), param=error.param)

    def _response(self, output: Output | None) -> ResponseObject:
        body = self._body
        choice: Any = body.tool_choice or "auto"
        if not isinstance(choice, str):
            choice = choice.model_dump()
        fields: dict[str, Any] = {
            "status": "in_progress",
            "incomplete_details": None,
            "usage": None,
        }
        items = [self._item(block, done=True) for block in self._blocks.all]
        if output is not None:
            cut = output.finish_reason == "length"
            n_prompt, n = len(output.prompt), output.ended.completion_tokens
            fields = {
                "status": "incomplete" if cut else "completed",
                "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
                "usage": {
                    "input_tokens": n_prompt,
                    "input_tokens_details": {
                        "cached_tokens": output.ended.cached_tokens,
                        "cache_write_tokens": 0,
                    },
                    "output_tokens": n,
                    "output_tokens_details": {
                        "reasoning_tokens": output.count_reasoning(self._tokenizer)
                    },
                    "total_tokens": n_prompt + n,
                    "prompt_memory": LostTokens.of(output.prompt_memory).model_dump(),
                },
                "message_memory": output.message_memory,
            }
        response = ResponseObject.model_validate(
            {
                "id": self._id,
                "created_at": self._created,
                "model": self._model,
                "output": items,
                "error": None,
                "instructions": body.instructions,
                "max_output_tokens": body.max_output_tokens,
                "metadata": body.metadata or {},
                "parallel_tool_calls": body.parallel_tool_calls is not False,
                "previous_response_id": body.previous_response_id,
                "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
                "store": body.store,
                "temperature": body.temperature,
                "text": {"format": self._format},
                "tool_choice": choice,
                "tools": [_given(tool) for tool in body.tools or ()],
                "top_logprobs": body.top_logprobs or 0,
                "top_p": body.top_p,
                "truncation": "auto" if self._truncation == "auto" else "disabled",
                **fields,
            }
        )
        if output is not None:
            self._store(self._id, response.model_dump_json())
        return response

    def _item(self, block: Block, *, done: bool) -> dict[str, Any]:
        status = ("completed" if block.complete else "incomplete") if done else "in_progress"
        kind = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        head = {"id": item_id(kind, self._id, block.index), "status": status}
        if block.kind == "call":
            namespace, name = self._functions.get(block.name, (None, block.name))
            named = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
            return {
                **head,
                "type": "function_call",
                "call_id": block.id,
                **named,
                "arguments": block.text,
            }
        content = [self._part(block)] if done else []
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._shown(block.logprobs)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _shown(self, found: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [one.model_dump() for one in chat_logprobs(self._tokenizer, found).content]

    def _step(self, step: Step) -> bytes:
        block = step.block
        at: dict[str, Any] = {"output_index": block.index}
        item = self._item(block, done=step.kind == "end")
        inside = {**at, "item_id": item["id"]}
        kind = {
            "text": "output_text",
            "reasoning": "reasoning_text",
            "call": "function_call_arguments",
        }[block.kind]
        if block.kind != "call":
            inside["content_index"] = 0
        logprobs: dict[str, Any] = {}
        if block.kind == "text":
            found = block.logprobs if step.kind == "end" else step.logprobs
            logprobs["logprobs"] = self._shown(found)
        if step.kind == "begin":
            added = self._event("response.output_item.added", **at, item=item)
            if block.kind == "call":
                return added
            part = self._part(block)
            return added + self._event("response.content_part.added", **inside, part=part)
        if step.kind == "more":
            return self._event(f"response.{kind}.delta", **inside, delta=step.text, **logprobs)
        if block.kind == "call":
            called = {"name": item["name"], "arguments": block.text}
            done = self._event(f"response.{kind}.done", **inside, **called)
        else:
            done = self._event(f"response.{kind}.done", **inside, text=block.text, **logprobs)
            done += self._event("response.content_part.done", **inside, part=self._part(block))
        return done + self._event("response.output_item.done", **at, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._n_events, **fields}
        self._n_events += 1
        return sse(json.dumps(event), kind)


def _given(tool: Tool) -> dict[str, Any]:
    """A tool of the request, in the response."""
    given = tool.model_dump()
    return {**given, "strict": bool(tool.strict)} if isinstance(tool, FunctionTool) else given
