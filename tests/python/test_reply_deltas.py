"""Streamed tool calls: deltas concatenate to the arguments, however the text is split."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_cpp.reply import (
    FORMATS,
    Call,
    CallDelta,
    Content,
    NoCall,
    Part,
    ReplyParser,
    parse_reply,
)
from support.random_search import examples
from support.written_calls import FORMAT_NAMES, format_of, split, written

SCHEMAS: dict[str, Any] = {
    name: {
        "type": "object",
        "properties": {"text": {"type": "string"}, "data": {}},
    }
    for name in ("f", "g")
}

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12)
data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner | texts, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries({}, optional={"text": texts, "data": data})
calls = st.lists(st.tuples(st.sampled_from(["f", "g"]), arguments), min_size=1, max_size=3)


def parts(name: str, pieces: list[str]) -> list[Part]:
    parser = ReplyParser(format_of(name), tools=SCHEMAS)
    return [part for piece in pieces for part in parser.push(piece)] + parser.finish()


def check(found: list[Part]) -> list[tuple[str, str]]:
    """The completed calls, after a check that deltas concatenate to their arguments."""
    sent: list[str] = []
    names: list[str | None] = []
    completed = []
    is_open = False
    for part in found:
        if isinstance(part, CallDelta):
            assert (part.name is None) == is_open
            if not is_open:
                assert part.index == len(sent)
                sent.append("")
                names.append(part.name)
            is_open = True
            sent[part.index] += part.arguments
        elif isinstance(part, Call):
            assert is_open
            assert part.index == len(sent) - 1
            assert (part.name, part.arguments) == (names[-1], sent[-1])
            completed.append((part.name, part.arguments))
            is_open = False
        elif isinstance(part, NoCall):
            assert is_open
            assert part.index == len(sent) - 1
            is_open = False
        else:
            assert not is_open
    assert not is_open
    return completed


@settings(max_examples=examples(100))
@given(
    st.sampled_from(FORMAT_NAMES),
    calls,
    st.lists(st.integers(0, 10_000), max_size=8),
    st.sampled_from([None, 2]),
)
def test_calls_at_any_split(
    name: str, called: list[tuple[str, dict[str, Any]]], cuts: list[int], indent: int | None
) -> None:
    text = written(name, called, indent=indent)
    expected = [*called]
    for pieces in ([text], [*text], split(text, cuts)):
        found = check(parts(name, pieces))
        assert [(tool, json.loads(text)) for tool, text in found] == expected


@settings(max_examples=examples(100))
@given(
    st.sampled_from(FORMAT_NAMES),
    calls,
    st.integers(0, 10_000),
    st.text('{}[]",:\\ \nx1<', max_size=3),
    st.booleans(),
)
def test_damaged_calls(
    name: str, called: list[tuple[str, dict[str, Any]]], position: int, new: str, ends: bool
) -> None:
    """Truncated, or with text inserted: the same calls at any split."""
    text = written(name, called)
    position %= len(text) + 1
    text = text[:position] + new + ("" if ends else text[position:])
    completed = parse_reply(text, format_of(name), tools=SCHEMAS)
    found = check(parts(name, [*text]))
    assert found == [(call.name, call.arguments) for call in completed.calls]
    assert check(parts(name, [text])) == found
    for _, text in found:
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_arguments_that_are_cut_do_not_look_complete(name: str) -> None:
    """A client that ignores finish_reason must not act on half of a text."""
    arguments = {"text": "abc", "data": [1, 23]}
    text = written(name, [("f", arguments)])
    for end in range(len(text)):
        found = parts(name, [text[:end]])
        sent = "".join(part.arguments for part in found if isinstance(part, CallDelta))
        with suppress(json.JSONDecodeError):
            assert json.loads(sent) == arguments


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_long_arguments_are_streamed_without_delay(name: str) -> None:
    """Each character of a long string is streamed at once, or with the next one."""
    long = 'a "b"\n' * 50
    text = written(name, [("f", {"text": long})])
    parser = ReplyParser(format_of(name), tools=SCHEMAS)
    sent, max_delay = "", 0
    position = text.index("a ", text.index("text"))
    end = position + 300
    for i, c in enumerate(text):
        sent += "".join(part.arguments for part in parser.push(c) if isinstance(part, CallDelta))
        if position <= i < end:
            delay = i + 1 - position - len(sent.removeprefix('{"text": "'))
            max_delay = max(max_delay, delay)
    assert max_delay <= 3
    assert json.loads(sent) == {"text": long}


def test_invalid_arguments_are_content() -> None:
    """Deltas stop where the arguments stop being JSON."""
    for bad in ("NaN", "tru", "01", "'a'", '"\\x"', "[1}", "{1: 2}", "[1,]"):
        text = f'<tool_call>{{"name": "f", "arguments": {{"x": 1, "y": {bad}}}}}</tool_call>'
        found = parts("hermes", [*text])
        streamed = "".join(part.arguments for part in found if isinstance(part, CallDelta))
        assert streamed.startswith('{"x": 1, "y": ')
        assert text.split('"arguments": ')[1].startswith(streamed)
        assert check(found) == []
        contents = [part.text for part in found if isinstance(part, NoCall | Content)]
        assert "".join(contents) == text


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_names_are_checked_only_if_any_json_could_be_a_call(name: str) -> None:
    text = written(name, [("made_up", {})])
    expected = [] if name == "llama3" else [("made_up", "{}")]
    assert check(parts(name, [*text])) == expected


def test_name_after_arguments() -> None:
    text = '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>'
    assert check(parts("hermes", [*text])) == [("f", '{"x": 1}')]
    text = '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>'
    assert check(parts("hermes", [*text])) == [("f", '{"x": 1}')]


def test_nesting_depth_is_limited() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 100_000
    assert check(parts("hermes", [text])) == []
    assert parse_reply(text, FORMATS["hermes"]).content == text
