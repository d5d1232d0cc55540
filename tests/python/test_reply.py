"""Reply parsers: results do not depend on how the text is split; no text is lost."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_cpp.reply import (
    FORMATS,
    Call,
    CallDelta,
    Reply,
    ReplyFormat,
    ReplyParser,
    ToolCall,
    format_of,
    parse_reply,
)
from support.random_search import examples

THINK = ("<think>", "</think>")
PLAIN = ReplyFormat("plain", think=THINK)
ALL = {**FORMATS, "thinks": PLAIN}

F = ToolCall("f", '{"x": 1}')
NONE = ToolCall("f", "{}")
G = ToolCall("g", '{"text": "a\\"} </tool_call>"}')
G_TEXT = r'{"text": "a\"} </tool_call>"}'

# Format, model output, and the parsed reply.
CASES: list[tuple[str, str, Reply]] = [
    ("hermes", "Hello", Reply("Hello")),
    ("hermes", "Hi \n", Reply("Hi \n")),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', Reply(calls=[F])),
    (
        "hermes",
        'Wait.\n\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\n'
        f'<tool_call>\n{{"name": "g", "arguments": {G_TEXT}}}\n</tool_call>\n',
        Reply("Wait.", calls=[F, G]),
    ),
    (
        "hermes",
        'Wait.\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\nIt runs. ',
        Reply("Wait.\n\nIt runs. ", calls=[F]),
    ),
    (
        "hermes",
        '\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\nIt runs.\n<tool_call>{',
        Reply("It runs.\n<tool_call>{", calls=[F]),
    ),
    (
        "hermes",
        'a <tool_call>{"name": "f", "arguments": {"x": 1}} <tool_call>{"name": "f", "arguments": {',
        Reply('a  <tool_call>{"name": "f", "arguments": {', calls=[F]),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}', Reply(calls=[F])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}\n</tool_', Reply(calls=[F])),
    ("hermes", 'A <tool_call>{"name": "f", "arguments": {"x": 1}}<', Reply("A", calls=[F])),
    (
        "hermes",
        'a <tool_call> {"x": 1}</tool_call> b',
        Reply('a <tool_call> {"x": 1}</tool_call> b'),
    ),
    ("hermes", "a\n<tool_call>b", Reply("a\n<tool_call>b")),
    ("hermes", "<tool_call>{", Reply("<tool_call>{")),
    ("hermes", '<tool_call>{"name": 1}', Reply('<tool_call>{"name": 1}')),
    ("hermes", "1 < 2 <tool", Reply("1 < 2 <tool")),
    (
        "qwen3-coder",
        "Yes\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
        Reply("Yes", calls=[F]),
    ),
    (
        "qwen3-coder",
        "<function=g>\n<parameter=text>\na <b>\n\nc\n</parameter>\n</function>",
        Reply(calls=[ToolCall("g", '{"text": "a <b>\\n\\nc"}')]),
    ),
    (
        "qwen3-coder",
        "a <function=f>\n<parameter=x>\n1\n</parameter>\n</function></tool_call> b",
        Reply("a  b", calls=[F]),
    ),
    (
        "qwen3-coder",
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call",
        Reply(calls=[F]),
    ),
    ("qwen3-coder", "<tool_call>\n<function=f>", Reply("<tool_call>\n<function=f>")),
    (
        "glm",
        "Hi\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n",
        Reply("Hi", calls=[F]),
    ),
    (
        "glm",
        "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call><tool_call>f</tool_call>",
        Reply(calls=[F, NONE]),
    ),
    ("glm", "<tool_call>f<arg_key>x</arg_key>", Reply("<tool_call>f<arg_key>x</arg_key>")),
    ("glm", "<tool_call>f<arg_value>1", Reply("<tool_call>f<arg_value>1")),
    ("glm", "a <tool_call> b", Reply("a <tool_call> b")),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', Reply(calls=[NONE])),
    ("hermes", '<tool_call>{"arguments": "", "name": "f"}</tool_call>', Reply(calls=[NONE])),
    (
        "harmony",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|><|call|>",
        Reply(calls=[NONE]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "it\\\'s"}}</tool_call>',
        Reply(calls=[ToolCall("f", '{"x": "it\'s"}')]),
    ),
    ("qwen3-coder", "a <tool_call> b", Reply("a <tool_call> b")),
    ("llama3", '{"name": "f", "parameters": {"x": 1}}', Reply(calls=[F])),
    (
        "llama3",
        '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; '
        f'{{"name": "g", "parameters": {G_TEXT}}}',
        Reply(calls=[F, G]),
    ),
    *(
        (
            "llama3",
            f'{{"name": "f", "parameters": {{"x": 1}}}}{between}'
            f'{{"name": "g", "parameters": {G_TEXT}}}',
            Reply(calls=[F, G]),
        )
        for between in ("\n", ", ", ",\n", " ;\n", "")
    ),
    ("llama3", '{"name": "f", "parameters": {"x": 1}}\n{"a": 1}', Reply('{"a": 1}', calls=[F])),
    ("llama3", '{"name": "h", "parameters": {}}', Reply('{"name": "h", "parameters": {}}')),
    ("llama3", ' {"a": 1} is JSON', Reply(' {"a": 1} is JSON')),
    ("llama3", "<|python_tag|>print(1)", Reply("<|python_tag|>print(1)")),
    ("llama3", 'It is {"name": "f"}', Reply('It is {"name": "f"}')),
    ("llama3", '{"name": "f", "parameters": {"x": 1}}; no', Reply("; no", calls=[F])),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, '
        f'{{"name": "g", "arguments": {G_TEXT}}}]',
        Reply(calls=[F, G]),
    ),
    (
        "mistral",
        f'Well. [TOOL_CALLS]f[ARGS]{{"x": 1}}[TOOL_CALLS]g[CALL_ID]abc123[ARGS]{G_TEXT}',
        Reply("Well.", calls=[F, G]),
    ),
    ("mistral", '[TOOL_CALLS]f{"x": 1}', Reply(calls=[F])),
    ("mistral", 'a [TOOL_CALLS]f{"x": 1}\nb', Reply("a \nb", calls=[F])),
    ("mistral", "[TOOL_CALLS]f[ARGS]no", Reply("[TOOL_CALLS]f[ARGS]no")),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f"}, 1]',
        Reply(", 1]", calls=[ToolCall("f", "{}")]),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>final<|message|>Hi",
        Reply("Hi", "Hm."),
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
        Reply("I look.", calls=[F]),
    ),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}', Reply(calls=[F])),
    (
        "harmony",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B"
        "<|end|><|start|>assistant<|channel|>commentary<|message|>C<|end|>"
        "<|start|>assistant<|channel|>final<|message|>D",
        Reply("C\nD", "A\nB"),
    ),
    ("harmony", "<|channel|>commentary to=f<|message|>x", Reply("x")),
    ("harmony", "Plain", Reply("Plain")),
    ("harmony", "<|channel|>fin", Reply("<|channel|>fin")),
    (
        "gemma4",
        "<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:f{x:1}<tool_call|>",
        Reply("I look.", "Hm.", [F]),
    ),
    (
        "gemma4",
        '<|tool_call>call:f{x:1}<tool_call|><|tool_call>call:g{text:<|"|>a"} </tool_call><|"|>}',
        Reply(calls=[F, G]),
    ),
    (
        "gemma4",
        '<|tool_call>call:f{ a : [1, true,null], <|"|>b c<|"|>:{d:<|"|>e<|"|>}, "g": "h" }',
        Reply(
            calls=[
                ToolCall("f", '{"a": [1, true, null], "b c": {"d": "e"}, "g": "h"}'),
            ]
        ),
    ),
    ("gemma4", "<|tool_call>call:f{}<tool_call|>", Reply(calls=[NONE])),
    ("gemma4", "<|tool_call>call:f{x:1", Reply("<|tool_call>call:f{x:1")),
    ("gemma4", "<|tool_call>call:f{x:}<tool_call|>", Reply("<|tool_call>call:f{x:}<tool_call|>")),
    ("gemma4", "<|tool_call>f{x:1}", Reply("<|tool_call>f{x:1}")),
    ("gemma4", "<|channel>thought\n<channel|>Hi", Reply("Hi")),
    ("gemma4", "a <|tool", Reply("a <|tool")),
    ("thinks", "<think>\nHm.\n\n</think>\n\nHi", Reply("Hi", "Hm.")),
    ("thinks", "\n<think>", Reply()),
    ("thinks", "\n<thin", Reply("\n<thin")),
    ("thinks", "<think>a", Reply("", "a")),
    ("thinks", "Hi <think>", Reply("Hi <think>")),
]
NAMES = ["f", "g"]


def read(format: ReplyFormat, pieces: list[str], **options: Any) -> Reply:
    parser = ReplyParser(format, tools=NAMES, **options)
    reply = Reply()
    for piece in pieces:
        reply.add(parser.push(piece))
    reply.add(parser.finish())
    return reply


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_known_replies_at_every_split(name: str, text: str, expected: Reply) -> None:
    format = ALL[name]
    assert parse_reply(text, format, tools=NAMES) == expected
    assert read(format, [*text]) == expected
    for i in range(1, len(text)):
        assert read(format, [text[:i], text[i:]]) == expected


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_known_replies_begun_in_the_prompt(name: str, text: str, expected: Reply) -> None:
    """Only what follows the beginning is emitted, but calls completely."""
    format = ALL[name]
    for i in range(1, len(text) + 1):
        begun, rest = text[:i], text[i:]
        before = parse_reply(begun, format, tools=NAMES)
        sent = Reply()
        sent.add(ReplyParser(format, tools=NAMES).push(begun))
        for pieces in ([rest], [*rest]):
            found = read(format, pieces, begun=begun)
            assert found.calls == expected.calls
            assert found.reasoning == without(before.reasoning, expected.reasoning)
            new = without(before.content, expected.content)
            if not expected.calls:
                assert found.content == new
            else:  # the end of the beginning may be a call's, and not content
                after = {new.strip(), expected.content[len(sent.content) :].strip()}
                assert found.content.strip() in after


def without(beginning: str, text: str) -> str:
    """The text after what it has in common with the beginning."""
    n = next((i for i, (a, b) in enumerate(zip(beginning, text, strict=False)) if a != b), None)
    return text[min(len(beginning), len(text)) if n is None else n :]


# Parts of the formats, in any order.
WORDS = [
    *sorted({marker for format in FORMATS.values() for marker in format.markers}),
    *THINK,
    *(
        "</function>",
        "<function=f>",
        "<parameter=x>",
        "</parameter>",
        " to=functions.f",
        "functions.",
    ),
    *('{"name": "f", "arguments": {"x": 1}}', '{"x": 1}', '"', "\\", "{", "}", "[", "]", ";", "\n"),
    *(" ", "f", "a", "é", "<", "<|", "["),
]


@settings(max_examples=examples(100))
@given(
    st.sampled_from(sorted(ALL)),
    st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=12).map("".join),
    st.lists(st.integers(0, 200), max_size=6),
    st.booleans(),
)
def test_random_text_at_random_splits(
    name: str, text: str, cuts: list[int], thinking: bool
) -> None:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(ends)]
    whole = parse_reply(text, ALL[name], tools=NAMES, thinking=thinking)
    assert read(ALL[name], pieces, thinking=thinking) == whole
    assert read(ALL[name], [*text], thinking=thinking) == whole
    for call in whole.calls:
        assert call.name
        assert isinstance(json.loads(call.arguments), dict)


@settings(max_examples=examples(100))
@given(
    st.sampled_from(sorted({*ALL} - {"harmony", "thinks"})),
    st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=12).map("".join),
)
def test_without_tools_everything_is_content(name: str, text: str) -> None:
    assert parse_reply(text, ALL[name], tools=[]) == Reply(text)


def test_content_is_streamed_without_trailing_space() -> None:
    parser = ReplyParser(FORMATS["hermes"])
    streamed = [[part.text for part in parser.push(c)] for c in "a b<x"]  # type: ignore[union-attr]
    assert streamed == [["a"], [], [" b"], [], ["<x"]]


def test_long_call() -> None:
    parser = ReplyParser(FORMATS["hermes"])
    parser.push('<tool_call>{"name": "f", "arguments": {"x": "')
    piece = "\\n" + "y" * 50
    for _ in range(4_000):
        assert parser.push(piece) == [CallDelta(0, None, piece)]
    *_, call = parser.push('"}}')
    assert call == Call(0, "f", f'{{"x": "{piece * 4_000}"}}')


def test_surrogates_and_constants() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>'
    [call] = parse_reply(text, FORMATS["hermes"]).calls
    call.arguments.encode()
    for bad in ('{"name": "f", "arguments": {"x": NaN}}', "[" * 5000 + "]" * 5000):
        assert parse_reply(f"<tool_call>{bad}", FORMATS["hermes"]) == Reply(f"<tool_call>{bad}")


@pytest.mark.parametrize(
    ("template", "name", "think"),
    [
        ("{{ messages }}", "generic", None),
        ("{% if tools %}<tool_call>{% endif %}", "hermes", None),
        ("{% if tools %}<tool_call>{% endif %}<think></think>", "hermes", THINK),
        ("<tool_call><function=x><parameter=y>", "qwen3-coder", None),
        ("<tool_call>{name}<arg_key></arg_key><arg_value></arg_value>", "glm", None),
        ("[TOOL_CALLS]", "mistral", None),
        ("[TOOL_CALLS][THINK][/THINK]", "mistral", ("[THINK]", "[/THINK]")),
        ("<|start_header_id|>{{ tools }}", "llama3", None),
        ("<|start_header_id|>", "generic", None),
        ("<|start|><|channel|>final<|message|>", "harmony", None),
    ],
)
def test_formats_of_templates(template: str, name: str, think: tuple[str, str] | None) -> None:
    found = format_of(template)
    assert (found.name, found.think) == (name, think)


def test_name_is_no_format() -> None:
    with pytest.raises(
        TypeError, match=r"format='hermes', expected a ReplyFormat, as from format_of"
    ):
        parse_reply("Hello", "hermes")  # type: ignore[arg-type]
