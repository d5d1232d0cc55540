"""Grammars of required tool calls: all text that they allow parses as calls with arguments that
match the schema.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator
from h2o_cpp.generation.grammar import make_constraint
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.reply import (
    FORMATS,
    ReplyFormat,
    Rules,
    call_grammar,
    form_grammar,
    format_named,
    parse_reply,
)
from support.tool_talk import WEATHER, spell, talking

pytest.importorskip("llguidance", reason="grammars need llguidance")

COLOR = {"type": "string", "enum": ["red", "«blue»"]}
TOOLS: dict[str, Any] = {
    "weather": WEATHER["function"]["parameters"],
    "get-time.now": None,
    "note": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "maxLength": 12},
            "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]$"},
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
ENDS = [b"<channel|>", b"</think>", b"<|end|>", b"\n</parameter>\n", b'"', b"]", b"}"]


def is_color(value: Any) -> bool:
    return value in COLOR["enum"]


def matches(name: str, arguments: dict[str, Any]) -> bool:
    """Whether the arguments match the schema in TOOLS."""
    if name == "get-time.now":
        return arguments == {}
    if name == "weather":
        return arguments["city"] in ("Graz", "Łódź")
    text, code, tags = arguments["text"], arguments.get("code"), arguments.get("tags", [])
    return (
        arguments.keys() <= TOOLS["note"]["properties"].keys()
        and isinstance(text, str)
        and len(text) <= 12
        and (code is None or re.search(r"^[A-Z]{2}/[0-9]$", code) is not None)
        and is_color(arguments["kind"])
        and isinstance(arguments["n"], int)
        and 0 <= arguments["n"] <= 99
        and len(tags) <= 2
        and all(map(is_color, tags))
        and (arguments.get("where") is None or is_color(arguments["where"]))
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """A tokenizer whose only special markers are <tool_call> and </tool_call>."""
    with Generator(talking(tmp_path_factory.mktemp("talk"), {})) as generator:
        yield generator.tokenizer


def sample(
    tokenizer: Tokenizer, grammar: str, seed: int, *, schema: dict[str, Any] | None = None
) -> str:
    """A random text that the grammar allows, of bytes and special tokens; schema: of its @form."""
    rng = random.Random(seed)
    if schema is None:
        constraint = make_constraint(tokenizer, "grammar", grammar)
    else:
        constraint = make_constraint(tokenizer, "schema", schema, around=grammar)
    tokens, text = [0], b""
    marker = b""  # the rest of an end marker: random bytes would hardly ever spell one
    while True:
        mask = np.zeros((tokenizer.n_vocab + 31) // 32, np.uint32)
        constraint(np.array(tokens, np.int32), mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits)]
        ends = [token for token in allowed if token in tokenizer.end_tokens]
        if ends and (len(ends) == len(allowed) or rng.random() < 0.4):
            return text.decode()
        if not marker and rng.random() < 0.2:
            marker = rng.choice(ENDS)
        if marker and marker[0] in allowed:
            token, marker = marker[0], marker[1:]
        else:
            token, marker = rng.choice([token for token in allowed if token not in ends]), b""
        tokens.append(token)
        text += tokenizer.token_bytes(token) or tokenizer.token_text(token).encode()
        assert len(tokens) < 5000, text


def grammar_of(
    tokenizer: Tokenizer,
    format: ReplyFormat,
    template: str,
    tools: Any = TOOLS,
    make: Callable[..., Any] = call_grammar,
    *,
    strict: bool = False,
    parallel: bool = True,
    thinking: bool = False,
) -> str:
    special = {"<tool_call>": 1, "</tool_call>": 2}
    rules = Rules(
        tools,
        strict=tools if strict else (),
        template=template,
        token_of=special.get,
        ends=tokenizer.end_tokens,
        parallel=parallel,
    )
    grammar: str = make(format, rules, thinking=thinking)
    return grammar


@pytest.mark.parametrize(("name", "template"), CASES)
def test_every_allowed_text_is_calls(tokenizer: Tokenizer, name: str, template: str) -> None:
    format = format_named(name, template)
    grammar = grammar_of(tokenizer, format, template)
    called: list[str] = []
    max_calls = 0
    for seed in range(30):
        text = sample(tokenizer, grammar, seed)
        reply = parse_reply(text, format, tools=TOOLS)
        assert reply.content == "", text
        assert reply.calls, text
        for call in reply.calls:
            assert matches(call.name, json.loads(call.arguments)), text
        called += [call.name for call in reply.calls]
        max_calls = max(max_calls, len(reply.calls))
    assert {*called} == TOOLS.keys()
    assert (max_calls > 1) == (name != "harmony")  # in harmony a call ends the reply


@pytest.mark.parametrize(("name", "template"), CASES)
def test_single_call_of_a_single_tool(tokenizer: Tokenizer, name: str, template: str) -> None:
    format = format_named(name, template)
    tools = {"weather": TOOLS["weather"]}
    grammar = grammar_of(tokenizer, format, template, tools, parallel=False)
    for seed in range(10):
        [call] = parse_reply(sample(tokenizer, grammar, seed), format).calls
        assert call.name == "weather"


@pytest.mark.parametrize("name", ["hermes", "llama3"])
def test_no_arguments_besides_those_of_the_schema(tokenizer: Tokenizer, name: str) -> None:
    """Even if the schema does not set additionalProperties to false."""
    format = format_named(name, "")
    schema = {"properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}}
    grammar = grammar_of(tokenizer, format, "", {"count": schema}, parallel=False)
    seen = set()
    for seed in range(20):
        [call] = parse_reply(sample(tokenizer, grammar, seed), format).calls
        seen |= {tuple(json.loads(call.arguments))}
    assert seen == {(), ("n",)}


@pytest.mark.parametrize(
    ("name", "template", "thinking"),
    [
        *((*case, False) for case in CASES),
        *((*case, True) for case in CASES if format_named(*case).think is not None),
    ],
)
def test_content_of_a_form_or_calls(
    tokenizer: Tokenizer, name: str, template: str, thinking: bool
) -> None:
    """Content that begins like a call of Llama 3 is no exception."""
    format = format_named(name, template)
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["weather", "Bob"]}, "parameters": {"const": 1}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    grammar = grammar_of(tokenizer, format, template, make=form_grammar, thinking=thinking)
    contents, called = set(), set()
    for seed in range(30):
        text = sample(tokenizer, grammar, seed, schema=schema)
        reply = parse_reply(text, format, tools=TOOLS, thinking=thinking)
        assert (reply.content == "") == (reply.calls != []), text
        for call in reply.calls:
            called.add(call.name)
            assert matches(call.name, json.loads(call.arguments)), text
        if not reply.calls:
            content = json.loads(reply.content)
            contents.add(content.pop("name"))
            assert content == {"parameters": 1}
    assert called
    assert contents == {"weather", "Bob"}


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder"])
def test_reply_that_starts_in_reasoning(tokenizer: Tokenizer, name: str) -> None:
    template = "<think></think>"
    format = format_named(name, template)
    grammar = grammar_of(tokenizer, format, template, thinking=True)
    for seed in range(10):
        text = sample(tokenizer, grammar, seed)
        assert "</think>" in text
        assert parse_reply(text, format, tools=TOOLS, thinking=True).calls


def allows(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    constraint = make_constraint(tokenizer, "grammar", grammar)
    tokens = [0]
    for token in [*spell(text), min(tokenizer.end_tokens)]:
        mask = np.zeros((tokenizer.n_vocab + 31) // 32, np.uint32)
        constraint(np.array(tokens, np.int32), mask)
        if not mask[token // 32] >> (token % 32) & 1:
            return False
        tokens.append(token)
    return True


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1], ["x"]),
        ({"type": "array", "contains": {"const": 1}, "minContains": 1}, [2], 2),
        ({"type": "object", "propertyNames": {"pattern": "^b"}}, {"a": 1}, 1),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1}, []),
        ({"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 9}}, 10, "x"),
        ({"type": "integer", "not": {"const": 1}}, 1, "x"),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 0}]}, 1, "x"),
        ({"type": "array", "items": {"type": "string", "format": "password"}}, ["x"], [1]),
        ({"type": "array", "items": {"type": "string", "pattern": "(?=a)"}}, ["x"], [1]),
        ({"type": "integer", "allOf": [{"type": "text"}]}, 1, "x"),
        ({"$ref": "#/none"}, 1, None),
    ],
)
def test_only_strict_tools_need_supported_schemas(
    tokenizer: Tokenizer, schema: Any, allowed: Any, refused: Any
) -> None:
    """The rest is still enforced."""
    tools = {"f": {"type": "object", "properties": {"x": schema}, "required": ["x"]}}
    for name, begin, end in (
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": ', "}}\n</tool_call>"),
        (
            "qwen3-coder",
            "<tool_call>\n<function=f>\n<parameter=x>\n",
            "\n</parameter>\n</function>\n</tool_call>",
        ),
    ):
        with pytest.raises(ValueError, match="the parameters of tool f: "):
            grammar_of(tokenizer, FORMATS[name], "", tools, strict=True)
        grammar = grammar_of(tokenizer, FORMATS[name], "", tools)
        assert allows(tokenizer, grammar, f"{begin}{json.dumps(allowed)}{end}")
        if refused is not None:
            assert not allows(tokenizer, grammar, f"{begin}{json.dumps(refused)}{end}")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("schema", [{"properties": 5}, {"$ref": "#/none"}, {"required": 5}])
def test_any_arguments_without_a_usable_schema(
    tokenizer: Tokenizer, name: str, schema: Any
) -> None:
    grammar = grammar_of(tokenizer, FORMATS[name], "", {"f": schema}, parallel=False)
    [call] = parse_reply(sample(tokenizer, grammar, 1), FORMATS[name], tools=["f"]).calls
    assert isinstance(json.loads(call.arguments), dict)


def test_end_token_is_not_part_of_the_grammar(tokenizer: Tokenizer) -> None:
    """gpt-oss ends calls with <|call|>, which ends the generation."""
    rules = Rules(TOOLS, template="", token_of={"<|call|>": 256}.get, ends=[256])
    grammar = call_grammar(FORMATS["harmony"], rules)
    assert "<[256]>" not in grammar
    text = sample(tokenizer, grammar, 1)
    assert not text.endswith("<|call|>")
    assert parse_reply(text, FORMATS["harmony"], tools=TOOLS).calls


def test_schema_decides_whether_digits_are_text() -> None:
    """In a format that writes strings without quotes."""
    format = FORMATS["qwen3-coder"]
    tools = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": ["string", "integer"]}}}}
    text = "<function=f><parameter=a>5</parameter><parameter=b>5</parameter></function>"
    [call] = parse_reply(text, format, tools=tools).calls
    assert json.loads(call.arguments) == {"a": "5", "b": 5}
    [call] = parse_reply(text, format, tools=["f"]).calls
    assert json.loads(call.arguments) == {"a": 5, "b": 5}


@pytest.mark.parametrize("name", ["qwen3-coder", "glm"])
@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "boolean"}, {"True": True, "false": False}),
        ({"type": "array"}, {"['x', None]": ["x", None], '["x"]': ["x"], "[x": "[x"}),
        ({"type": "integer"}, {"5": 5, "five": "five", "None": None}),
        (
            {"type": ["string", "null"]},
            {"90210": "90210", '{"a": 1}': '{"a": 1}', "null": None, "None": None, '"a"': "a"},
        ),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"5": "5", "true": "true"}),
        ({"anyOf": [{"$ref": "#/$defs/T"}, {"type": "integer"}]}, {"5": 5, "True": "True"}),
        ({"anyOf": [{"$ref": "#/properties/a"}, {"type": "null"}]}, {"x": "x", "None": None}),
        ({"anyOf": [{"$ref": "#/properties/a"}] * 50}, {"x": "x", "5": 5}),
        ({"anyOf": 5, "oneOf": "x"}, {"x": "x", "5": 5}),
        ({"type": 5}, {"x": "x", "5": 5}),
        ({"enum": 5}, {"x": "x"}),
    ],
)
def test_values_without_quotes(name: str, schema: dict[str, Any], values: dict[str, Any]) -> None:
    """A value that the schema permits; Python's spelling is that of the templates."""
    arguments = {"properties": {"a": schema}, "$defs": {"T": {"type": "string"}}}
    for text, expected in values.items():
        reply = {
            "qwen3-coder": f"<function=f><parameter=a>{text}</parameter></function>",
            "glm": f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>",
        }[name]
        [call] = parse_reply(reply, FORMATS[name], tools={"f": arguments}).calls
        assert json.loads(call.arguments) == {"a": expected}


def test_end_marker_within_an_argument() -> None:
    text = ' to=functions.f<|channel|>commentary<|message|>{"a": "<|call|>"}<|call|>'
    [call] = parse_reply(text, FORMATS["harmony"]).calls
    assert json.loads(call.arguments) == {"a": "<|call|>"}


@pytest.mark.parametrize(
    ("name", "tools", "message"),
    [
        ("hermes", {}, "no tool to call"),
        ("hermes", {"a b": None}, "tool name 'a b' is invalid"),
        ("hermes", {"f": {"type": "string"}}, "parameters of f must have type object"),
        ("qwen3-coder", {"f": {"anyOf": []}}, "of tool f: 'anyOf' is not supported"),
        ("qwen3-coder", {"f": {"properties": {"a>": {}}}}, "of tool f: 'a>' cannot be written"),
        ("gemma4", {"f": {"properties": {"og:title": {}}}}, "'og:title' cannot be written"),
        ("gemma4", {"f": {"properties": {"a,b": {}}}}, "'a,b' cannot be written"),
        ("gemma4", {"f": {"properties": {'"x': {}}}}, "'\"x' cannot be written"),
        ("qwen3-coder", {"f": {"properties": 5}}, "of tool f: this is not a JSON Schema"),
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
        ("hermes", {"f": {"properties": {"a": {"type": "text"}}}}, "of tool f: Invalid type: text"),
        ("qwen3-coder", {"f": {"properties": {"a": {"$ref": "#/b"}}}}, "tool f: a .ref does not"),
        *(
            (
                name,
                {"f": {"properties": {"a": {"type": "string", "pattern": "("}}}},
                "tool f: regex",
            )
            for name in ("mistral", "qwen3-coder")
        ),
    ],
)
def test_invalid_tools(tokenizer: Tokenizer, name: str, tools: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grammar_of(tokenizer, FORMATS[name], "", tools, strict=True)
