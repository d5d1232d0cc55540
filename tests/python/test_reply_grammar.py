"""Grammars of required tool calls: everything they allow parses as a call with arguments that match
the schema.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator
from h2o_cpp.generation.grammar import make_constraint
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.reply import FORMATS, ReplyFormat, call_grammar, format_named, parse_reply
from support.tool_talk import WEATHER, talking

pytest.importorskip("llguidance", reason="grammars need llguidance")

COLOR = {"type": "string", "enum": ["red", "«blue»"]}
TOOLS: dict[str, Any] = {
    "weather": WEATHER["function"]["parameters"],
    "get-time.now": None,
    "note": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "maxLength": 12},
            "code": {"type": "string", "pattern": "^[A-Z]{2}/\\d$"},
            "kind": {"$ref": "#/$defs/Color"},
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/Color"}, "maxItems": 2},
            "where": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]},
        },
        "required": ["text", "kind", "n"],
        "additionalProperties": False,
        "$defs": {"Color": COLOR},
    },
}
CASES = [
    *((name, "") for name in FORMATS),
    ("mistral", "[ARGS]"),
    ("hermes", "<think></think>"),
    ("llama3", "<think></think>"),
]
ENDS = [b"</think>", b"<|end|>", b"\n</parameter>\n", b'"', b"]", b"}"]


def is_color(value: Any) -> bool:
    return value in COLOR["enum"]


def matches(name: str, arguments: dict[str, Any]) -> bool:
    """Whether they are as TOOLS has it."""
    if name == "get-time.now":
        return arguments == {}
    if name == "weather":
        return arguments["city"] in ("Graz", "Łódź")
    text, code, tags = arguments["text"], arguments.get("code"), arguments.get("tags", [])
    return (
        arguments.keys() <= TOOLS["note"]["properties"].keys()
        and isinstance(text, str)
        and len(text) <= 12
        and (code is None or re.search(r"^[A-Z]{2}/\d$", code) is not None)
        and is_color(arguments["kind"])
        and isinstance(arguments["n"], int)
        and 0 <= arguments["n"] <= 99
        and len(tags) <= 2
        and all(map(is_color, tags))
        and (arguments.get("where") is None or is_color(arguments["where"]))
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """In which <tool_call> and </tool_call> are special tokens, and no other marker is."""
    with Generator(talking(tmp_path_factory.mktemp("talk"), {})) as generator:
        yield generator.tokenizer


def sample(tokenizer: Tokenizer, grammar: str, seed: int) -> str:
    """A text by a grammar, of random bytes and special tokens."""
    chance = random.Random(seed)
    constraint = make_constraint(tokenizer, "grammar", grammar)
    tokens, said = [0], b""
    wanted = b""  # an end that is being spelled, as random bytes hardly ever do
    while True:
        mask = np.zeros((tokenizer.n_vocab + 31) // 32, np.uint32)
        constraint(np.array(tokens, np.int32), mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits)]
        ends = [token for token in allowed if token in tokenizer.end_tokens]
        if ends and (len(ends) == len(allowed) or chance.random() < 0.4):
            return said.decode()
        if not wanted and chance.random() < 0.2:
            wanted = chance.choice(ENDS)
        if wanted and wanted[0] in allowed:
            token, wanted = wanted[0], wanted[1:]
        else:
            token, wanted = chance.choice([one for one in allowed if one not in ends]), b""
        tokens.append(token)
        said += tokenizer.token_bytes(token) or tokenizer.token_text(token).encode()
        assert len(tokens) < 5000, said


def grammar_of(
    tokenizer: Tokenizer, format: ReplyFormat, template: str, tools: Any = TOOLS, **options: Any
) -> str:
    special = {"<tool_call>": 1, "</tool_call>": 2}
    return call_grammar(
        format,
        tools,
        template=template,
        token_of=special.get,
        ends=tokenizer.end_tokens,
        **options,
    )


@pytest.mark.parametrize(("name", "template"), CASES)
def test_every_text_is_calls(tokenizer: Tokenizer, name: str, template: str) -> None:
    format = format_named(name, template)
    grammar = grammar_of(tokenizer, format, template)
    called: list[str] = []
    n_most = 0
    for seed in range(60):
        text = sample(tokenizer, grammar, seed)
        reply = parse_reply(text, format, tools=TOOLS)
        assert reply.content == "", text
        assert reply.calls, text
        for call in reply.calls:
            assert matches(call.name, json.loads(call.arguments)), text
        called += [call.name for call in reply.calls]
        n_most = max(n_most, len(reply.calls))
    assert {*called} == TOOLS.keys()
    assert (n_most > 1) == (name != "harmony")  # whose calls each end the reply


@pytest.mark.parametrize(("name", "template"), CASES)
def test_one_call_of_one_tool(tokenizer: Tokenizer, name: str, template: str) -> None:
    format = format_named(name, template)
    tools = {"weather": TOOLS["weather"]}
    grammar = grammar_of(tokenizer, format, template, tools, parallel=False)
    for seed in range(10):
        [call] = parse_reply(sample(tokenizer, grammar, seed), format).calls
        assert call.name == "weather"


@pytest.mark.parametrize("name", ["hermes", "llama3"])
def test_arguments_are_those_of_the_schema(tokenizer: Tokenizer, name: str) -> None:
    """Which does not say that there are no others, as most do not."""
    format = format_named(name, "")
    schema = {"properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}}
    grammar = grammar_of(tokenizer, format, "", {"count": schema}, parallel=False)
    seen = set()
    for seed in range(20):
        [call] = parse_reply(sample(tokenizer, grammar, seed), format).calls
        seen |= {tuple(json.loads(call.arguments))}
    assert seen == {(), ("n",)}


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder"])
def test_a_reply_that_begins_inside_of_reasoning(tokenizer: Tokenizer, name: str) -> None:
    template = "<think></think>"
    format = format_named(name, template)
    grammar = grammar_of(tokenizer, format, template, thinking=True)
    for seed in range(10):
        text = sample(tokenizer, grammar, seed)
        assert "</think>" in text
        assert parse_reply(text, format, tools=TOOLS, thinking=True).calls


def test_a_marker_that_ends_the_output(tokenizer: Tokenizer) -> None:
    """gpt-oss ends with <|call|>, and the grammar leaves that to the end of the output."""
    grammar = call_grammar(
        FORMATS["harmony"],
        TOOLS,
        template="",
        token_of={"<|call|>": 256}.get,
        ends=[256],
    )
    assert "<[256]>" not in grammar
    text = sample(tokenizer, grammar, 1)
    assert not text.endswith("<|call|>")
    assert parse_reply(text, FORMATS["harmony"], tools=TOOLS).calls


def test_text_that_looks_like_a_number() -> None:
    """Where calls are written without quotes, the schema says what is text."""
    format = FORMATS["qwen3-coder"]
    tools = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": ["string", "integer"]}}}}
    said = "<function=f><parameter=a>5</parameter><parameter=b>5</parameter></function>"
    [call] = parse_reply(said, format, tools=tools).calls
    assert json.loads(call.arguments) == {"a": "5", "b": 5}
    [call] = parse_reply(said, format, tools=["f"]).calls
    assert json.loads(call.arguments) == {"a": 5, "b": 5}


def test_an_end_that_is_spelled_in_an_argument() -> None:
    said = ' to=functions.f<|channel|>commentary<|message|>{"a": "<|call|>"}<|call|>'
    [call] = parse_reply(said, FORMATS["harmony"]).calls
    assert json.loads(call.arguments) == {"a": "<|call|>"}


@pytest.mark.parametrize(
    ("name", "tools", "message"),
    [
        ("hermes", {}, "no tool to call"),
        ("hermes", {"a b": None}, "tool name 'a b' is invalid"),
        ("hermes", {"f": {"type": "string"}}, "parameters of f must have type object"),
        ("qwen3-coder", {"f": {"anyOf": []}}, "parameters of f have 'anyOf'"),
        ("qwen3-coder", {"f": {"properties": {"a>": {}}}}, "'a>' of f cannot be written"),
        ("qwen3-coder", {"f": {"properties": 5}}, "parameters of f are not a JSON Schema"),
        ("qwen3-coder", {"f": {"properties": {"a": {"const": "</function>"}}}}, "no value of an"),
        (
            "qwen3-coder",
            {"f": {"properties": {"a": {"type": "string", "minLength": "1"}}}},
            "is not a number",
        ),
        ("hermes", {"f": {"properties": {"a": b""}}}, "schema is not JSON"),
        (
            "qwen3-coder",
            {"f": {"properties": {"a": {"type": "string", "allOf": []}}}},
            "has 'allOf'",
        ),
    ],
)
def test_what_is_refused(tokenizer: Tokenizer, name: str, tools: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grammar_of(tokenizer, FORMATS[name], "", tools)
