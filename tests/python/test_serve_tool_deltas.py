"""The official OpenAI and Anthropic clients assemble streamed calls, however the text is split."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.needs import packages
from support.written_calls import FORMAT_NAMES, format_of, split, written

pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")

from h2o_cpp import PromptMemory
from h2o_cpp.reply import ReplyParser
from h2o_cpp.serve.completions import _Chat
from h2o_cpp.serve.generation_response import GenerationResponse
from h2o_cpp.serve.messages import _Message
from h2o_cpp.serve.openai_requests import ChatRequest
from h2o_cpp.serve.options import Defaults
from h2o_cpp.serve.outputs import Output
from h2o_cpp.serve.responses_api import _Response
from h2o_cpp.serve.responses_request import ResponsesRequest

SCHEMA: Any = {"type": "object", "properties": {"text": {"type": "string"}, "data": {}}}
CALLS: Any = [
    ("f", {"text": 'Łódź "now"\n\n</p> \\ \t.', "data": [1, -2.5e3, {"a": None}, True]}),
    ("g", {}),
    ("f", {"data": {"b": ["x", ""]}}),
]
TOKENIZER = SimpleNamespace(encode=lambda text, **_: [*text])
SERVICE: Any = SimpleNamespace(
    name="m", generator=SimpleNamespace(tokenizer=TOKENIZER), defaults=Defaults()
)

formats = st.sampled_from(FORMAT_NAMES)
cuts = st.lists(st.integers(0, 10_000), max_size=30)


def make_output(name: str) -> Output:
    nothing: Any = SimpleNamespace(cached_tokens=0, memory_of=lambda parts: PromptMemory())
    output = Output(0, [1, 2, 3], nothing, nothing, nothing)
    output.parser = ReplyParser(format_of(name), tools={"f": SCHEMA, "g": SCHEMA})
    return output


def make_body(response: GenerationResponse, output: Output, text: str, cuts: list[int]) -> bytes:
    """The response body for a text that arrives in pieces."""
    body = response.begin()
    for piece in split(text, cuts):
        body += response.event(output, piece)
    generation: Any = SimpleNamespace(
        text=text,
        drafted_tokens=0,
        accepted_tokens=0,
        finish_reason="stop",
        stop_string="",
        completion_tokens=9,
        cached_tokens=0,
        prompt_seconds=0.5,
        decode_seconds=2.0,
    )
    output.generation = generation
    return body + response.event(output, "") + response.end()


class Replay(BaseHTTPRequestHandler):
    """Sends the same response to every request."""

    body = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Replay) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def openai_client(url: str) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(url: str) -> Iterator[Any]:
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        yield client


@packages("openai")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(formats, cuts)
def test_chat_client(openai_client: Any, name: str, cuts: list[int]) -> None:
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    )
    output = make_output(name)
    Replay.body = make_body(_Chat(SERVICE, body, [output]), output, written(name, CALLS), cuts)
    request: Any = {"messages": [{"role": "user", "content": "Hi"}], "model": "m"}
    tools: Any = [
        {"type": "function", "function": {"name": name_, "parameters": SCHEMA}} for name_ in "fg"
    ]
    with openai_client.chat.completions.stream(**request, tools=tools) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    functions = [call.function for call in message.tool_calls]
    for found in (functions, done):
        assert [(call.name, json.loads(call.arguments)) for call in found] == CALLS
    assert len({call.id for call in message.tool_calls}) == len(CALLS)


@packages("openai")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(formats, cuts)
def test_responses_client(openai_client: Any, name: str, cuts: list[int]) -> None:
    body = ResponsesRequest.model_validate({"input": "Hi", "stream": True})
    output = make_output(name)
    Replay.body = make_body(_Response(SERVICE, body, [output]), output, written(name, CALLS), cuts)
    with openai_client.responses.stream(model="m", input="Hi") as stream:
        deltas = ["", "", ""]
        done = []
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                deltas[event.output_index] += event.delta
            elif event.type == "response.function_call_arguments.done":
                done.append(event.arguments)
        items: Any = stream.get_final_response().output
    assert [(item.name, json.loads(item.arguments)) for item in items] == CALLS
    assert [item.arguments for item in items] == deltas == done
    assert {item.status for item in items} == {"completed"}


@packages("anthropic")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(formats, cuts)
def test_messages_client(anthropic_client: Any, name: str, cuts: list[int]) -> None:
    output = make_output(name)
    response = _Message("m", [output], stream=True)
    Replay.body = make_body(response, output, written(name, CALLS), cuts)
    request: Any = {"messages": [{"role": "user", "content": "Hi"}], "model": "m", "max_tokens": 9}
    with anthropic_client.messages.stream(**request) as stream:
        for _ in stream:
            pass
        message = stream.get_final_message()
    blocks: Any = message.content
    assert [(block.name, block.input) for block in blocks] == CALLS
    assert message.stop_reason == "tool_use"


@packages("anthropic")
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_truncated_call_is_not_repeated_as_text(anthropic_client: Any, name: str) -> None:
    text = written(name, CALLS[:1])
    text = text[: text.index("now")]
    output = make_output(name)
    Replay.body = make_body(_Message("m", [output], stream=True), output, text, [*range(len(text))])
    request: Any = {"messages": [{"role": "user", "content": "Hi"}], "model": "m", "max_tokens": 9}
    with anthropic_client.messages.stream(**request) as stream:
        for _ in stream:
            pass
        [block] = stream.get_final_message().content
    assert (block.type, block.name) == ("tool_use", "f")
    assert output.reply.calls == []
