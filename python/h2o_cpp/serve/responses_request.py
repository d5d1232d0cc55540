"""The request objects of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, PrivateAttr, Tag, TypeAdapter

from h2o_cpp.files.visible_text import visible_log
from h2o_cpp.model.truncation import Truncation
from h2o_cpp.serve.chat_messages import (
    FunctionDefinition,
    RefusalPart,
    text_of,
    tool_call,
    without_images,
)
from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.openai_requests import (
    ChatRequest,
    Effort,
    JsonFormat,
    JsonSchema,
    ModelRequest,
    TextFormat,
)
from h2o_cpp.serve.sampling import Draft, Protect, TopLogprobs, TopP
from h2o_cpp.serve.schema import ByType, ListOf, NonEmptyList, NonEmptyText, Schema, Tolerant, check
from h2o_cpp.serve.stored_responses import StoredResponses


class TextContent(Tolerant):
    """Text."""

    type: Literal["input_text", "output_text", "text"]
    text: str


_Parts = ListOf[ByType[TextContent | RefusalPart]]


class MessageItem(Tolerant):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Parts


class CallItem(Tolerant):
    """A tool call by the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class ResultItem(Tolerant):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[str | _Parts, BeforeValidator(without_images)]


class ReasoningText(Tolerant):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Tolerant):
    """The assistant's earlier reasoning, before the message or call that it belongs to."""

    type: Literal["reasoning"]
    content: ListOf[ReasoningText] | None = None


class ItemReference(Tolerant):
    """An item of an earlier response."""

    type: Literal["item_reference"] = "item_reference"
    id: str


def _type_of(item: Any) -> str:
    """The type of an item; messages and references may have none."""
    if not isinstance(item, dict):  # an item that is written, or an error
        return getattr(item, "type", "message")
    is_reference = "id" in item and "role" not in item
    return str(item.get("type") or ("item_reference" if is_reference else "message"))


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_type_of),
]
_ITEMS = TypeAdapter(list[Item])
_NOTHING = StoredResponses(max_bytes=0)


class FunctionTool(FunctionDefinition):
    """A tool that the model may call."""

    ignored = ("allowed_callers", "defer_loading", "output_schema")
    type: Literal["function"]


class NamespaceTool(Schema):
    """Functions, whose names the model sees with the namespace in front."""

    type: Literal["namespace"]
    name: NonEmptyText
    description: str | None = None
    tools: ListOf[FunctionTool]


class OtherTool(BaseModel):
    """A tool of another type, such as one that OpenAI's servers run; the model does not see it."""

    type: str


def _kind_of(tool: Any) -> str:
    given = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return given if given in ("function", "namespace") else "other"


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(_kind_of),
]


@lru_cache(maxsize=64)  # once for each type
def _warn(kind: str) -> None:
    _log.warning("tools of type %r are left out, expected functions and namespaces", kind)


class FunctionChoice(Schema):
    """Requires a call of this tool."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Schema):
    """Leaves only these of `tools`; mode: as tool_choice."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: NonEmptyList[FunctionChoice]


class Reasoning(Schema):
    """Passed to the chat template."""

    ignored = ("summary", "generate_summary", "context", "mode")
    effort: Effort | None = None


class SchemaFormat(JsonSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class TextSettings(Schema):
    """The format of the text."""

    ignored = ("verbosity",)
    format: ByType[TextFormat | JsonFormat | SchemaFormat] | None = None

    def response_format(self) -> dict[str, Any] | None:
        """The equivalent response_format of a ChatRequest."""
        if self.format is None:
            return None
        given = self.format.model_dump(by_alias=True, exclude_unset=True)
        if isinstance(self.format, SchemaFormat):
            del given["type"]
            return {"type": "json_schema", "json_schema": given}
        return given


_log = visible_log("uvicorn.error")  # the server's log

_SAME_IN_CHATS = {
    *("draft", "parallel_tool_calls", "protect", "stream", "temperature", "top_logprobs"),
    *("top_p", "truncation"),
}
_LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]


def _as_error(truncation: Any) -> Any:
    """OpenAI's name."""
    return "error" if truncation == "disabled" else truncation


class ResponsesRequest(ModelRequest):
    """Answer the last message of a conversation."""

    ignored = (
        *("user", "service_tier", "client_metadata"),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "stream_options"),
        *("prompt_cache_options", "access_programs"),
        "max_tool_calls",  # of hosted tools
    )
    input: str | NonEmptyList[Item]
    previous_response_id: str | None = Field(
        None, description="continue after this response, without its instructions"
    )
    store: bool = Field(
        True, description="keep the response for a while, so that later requests can refer to it"
    )
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: TopP | None = None
    tools: ListOf[Tool] | None = Field(
        None, description="tools of other types are left out, with a warning in the log"
    )
    tool_choice: (
        Literal["none", "auto", "required"] | ByType[FunctionChoice | AllowedFunctions] | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    background: Literal[False] | None = None
    truncation: Annotated[Truncation, BeforeValidator(_as_error)] | None = Field(
        None, description="as in /v1/chat/completions; disabled: error"
    )
    metadata: dict[str, str] | None = Field(None, max_length=16)
    include: ListOf[Included] | None = Field(
        None, description=f"only {_LOGPROBS} has an effect: log-probabilities of the text"
    )
    top_logprobs: TopLogprobs = None
    draft: Draft = True
    protect: Protect = None
    _stored: StoredResponses = PrivateAttr(default_factory=lambda: _NOTHING)

    def refer_to(self, stored: StoredResponses) -> None:
        """Set the responses that the request may refer to."""
        self._stored = stored

    def items(self) -> list[Item]:
        """The items of `input`, with those that it refers to. Raises ApiError."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        found: list[Item] = []
        for item in self.input:
            if isinstance(item, ItemReference):
                found += _ITEMS.validate_json(self._stored.item(item.id))
            else:
                found.append(item)
        return found

    def storing(self) -> Callable[[str, str], None]:
        """A function that stores the response, given its id and JSON, if it is to be stored."""
        if not self.store:
            return lambda id, response: None
        given = _ITEMS.dump_json(self.items(), exclude_none=True).decode()
        stored, previous = self._stored, self.previous_response_id
        return lambda id, response: stored.add(id, previous, given, response)

    def functions(self) -> Iterator[tuple[str | None, FunctionTool]]:
        """The functions that the model may call, each with its namespace."""
        for tool in self.tools or ():
            if isinstance(tool, FunctionTool):
                yield None, tool
            elif isinstance(tool, NamespaceTool):
                for function in tool.tools:
                    yield tool.name, function
            else:
                _warn(tool.type)

    def chat(self) -> ChatRequest:
        """The equivalent ChatRequest. Raises ApiError."""
        logprobs = _LOGPROBS in (self.include or ())
        if self.top_logprobs and not logprobs:
            message = f"top_logprobs needs {_LOGPROBS} in include"
            raise ApiError(400, message, param="top_logprobs")
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        items: list[Item] = []
        if self.previous_response_id is not None:
            for earlier in self._stored.conversation(self.previous_response_id):
                items += _ITEMS.validate_json(earlier)
        for item in [*items, *self.items()]:
            _add(messages, item)
        _drop_mere_reasoning(messages)
        functions = [
            {
                **function.model_dump(exclude_unset=True, exclude={"type"}),
                "name": shown_name(namespace, function.name),
            }
            for namespace, function in self.functions()
        ]
        return check(
            ChatRequest,
            {
                "messages": messages,
                "continue_final_message": False,  # as OpenAI's
                "tools": [{"type": "function", "function": one} for one in functions],
                "tool_choice": _choice(self.tool_choice),
                "max_tokens": self.max_output_tokens,
                "logprobs": logprobs,
                "response_format": None if self.text is None else self.text.response_format(),
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
                **self.model_dump(include=_SAME_IN_CHATS),
            },
        )


def shown_name(namespace: str | None, name: str) -> str:
    """The name of a function that the model sees."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def _add(messages: list[dict[str, Any]], item: Item) -> None:
    """Append an item as a chat message; a tool call joins the assistant's message before it.

    The messages for the system at the beginning become one: many chat templates drop or refuse
    others. Reasoning is a part of the message or call that follows.
    """
    if isinstance(item, ReasoningItem):
        if text := "".join(piece.text for piece in item.content or ()):
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        return
    if not (
        (isinstance(item, MessageItem) and item.role == "assistant") or isinstance(item, CallItem)
    ):
        _drop_mere_reasoning(messages)
    if isinstance(item, MessageItem):
        role = "system" if item.role == "developer" else item.role
        text = text_of(item.content)
        if role == "assistant" and _is_mere_reasoning(messages):
            messages[-1]["content"] = text
        elif role == "system" and [message["role"] for message in messages] == ["system"]:
            messages[0]["content"] += f"\n\n{text}"
        else:
            messages.append({"role": role, "content": text})
    elif isinstance(item, ResultItem):
        content = text_of(item.output)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    elif isinstance(item, CallItem):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        name = shown_name(item.namespace, item.name)
        call = tool_call(item.call_id, name, item.arguments)
        messages[-1].setdefault("tool_calls", []).append(call)


def _is_mere_reasoning(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is reasoning that nothing follows yet."""
    return (
        bool(messages)
        and messages[-1].keys() == {"role", "content", "reasoning_content"}
        and not messages[-1]["content"]
    )


def _drop_mere_reasoning(messages: list[dict[str, Any]]) -> None:
    if _is_mere_reasoning(messages):
        messages.pop()


def _choice(choice: Any) -> Any:
    """The equivalent tool_choice of a ChatRequest."""
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [_choice(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice
