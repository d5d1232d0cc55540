"""The server tested by schemathesis with its own OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from h2o_cpp import Generator

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

import schemathesis

from support.random_search import examples
from support.serving import Server, serving

# Whether valid data is accepted also depends on the model: its vocabulary and context.
EXCLUDED = [schemathesis.checks.positive_data_acceptance]


KEY = "sesame"
TEMPLATE = "{{ messages[0].content }}"


@pytest.fixture(scope="module")
def server(tiny_opt: Path) -> Iterator[Server]:
    with (
        Generator(tiny_opt, hh=20, n_ctx=64, max_sequences=2, threads=1) as generator,
        serving(generator, template=TEMPLATE, max_tokens=8, api_key=KEY) as server,
    ):
        yield server


OPERATIONS = [
    ("GET", "/api/ps"),
    ("GET", "/api/tags"),
    ("GET", "/api/version"),
    ("POST", "/api/chat"),
    ("POST", "/api/embed"),
    ("POST", "/api/embeddings"),
    ("POST", "/api/generate"),
    ("POST", "/api/show"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/{id}"),
    ("DELETE", "/v1/responses/{id}"),
    ("GET", "/v1/responses/{id}/input_items"),
    ("GET", "/props"),
    ("GET", "/slots"),
    ("POST", "/apply-template"),
    ("POST", "/completion"),
    ("POST", "/infill"),
    ("POST", "/detokenize"),
    ("POST", "/tokenize"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/input_tokens"),
    ("POST", "/v1/completions"),
]


def open_api(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_operation_is_listed(server: Server) -> None:
    found = [result.ok() for result in open_api(server).get_all_operations()]
    assert sorted((op.method.upper(), op.path) for op in found) == sorted(OPERATIONS)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        (method, path, allowed)
        for method, path in OPERATIONS
        for allowed in (True, False)
        # The other GET requests have no parameters that could be invalid.
        if allowed or method != "GET" or path == "/v1/models"
    ],
)
def test_responses_match_the_schema(server: Server, allowed: bool, method: str, path: str) -> None:
    """For valid and invalid requests; none of the responses is 5xx."""
    mode = schemathesis.GenerationMode.POSITIVE if allowed else schemathesis.GenerationMode.NEGATIVE
    operation = open_api(server)[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(suppress_health_check=[*HealthCheck], max_examples=examples(30))
    def check(case: Any) -> None:
        case.call_and_validate(headers={"Authorization": f"Bearer {KEY}"}, excluded_checks=EXCLUDED)

    check()
    assert not server.engine.closed


def test_docs_page_lists_every_field(server: Server) -> None:
    """The page loads no external resources."""
    answer = server.ask("/docs")
    assert answer.status == 200
    assert "text/html" in answer.headers["Content-Type"]
    page = unescape(answer.body.decode())
    document = server.ask("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code>" in page
    for name in ("CompletionRequest", "ChatRequest", "Message", "StreamSettings"):
        for field, schema in document["components"]["schemas"][name]["properties"].items():
            assert f"<code>{field}</code>" in page
            assert schema.get("description", "") in page
    assert "//" not in page


def test_docs_page_names_the_types_of_unions(server: Server) -> None:
    page = unescape(server.ask("/docs").body.decode())
    fields = set(re.findall(r"<code>(\w+)</code>.*?</td><td>(.*?)</td>", page))
    formats = "TextFormat or JsonObjectFormat or JsonSchemaFormat"
    assert ("response_format", formats) in fields
    assert ("content", "string or list of TextPart or RefusalPart") in fields
    assert ("output_config", "OutputConfig") in fields  # ignored only where tokens are counted
    assert "__" not in "".join(kind for _, kind in fields)
