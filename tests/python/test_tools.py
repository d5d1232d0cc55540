"""Tools in Python: rendered by templates, and calls in replies."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from h2o_cpp.cli import main
from h2o_cpp.model.chat_template import ChatTemplate
from h2o_cpp.model.chat_turn import tool_schemas
from h2o_cpp.reply import Reply, ToolCall
from support.needs import packages
from support.scripted_chat import user
from support.tool_talk import (
    DOCUMENTS,
    HERMES,
    LLAMA,
    QWEN,
    THINKS,
    TOOLS,
    WEATHER,
    spell,
    talking,
)
from support.vocabularies import byte_pairs, tokenizer_of

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Graz"}}</tool_call>'
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Łódź? <|im_end|>"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {
                    "name": "weather",
                    "arguments": {"city": "Łódź", "é": [1, None, True]},
                },
            }
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": '{"sky": "<clear> & "}'},
]
BOOKS = [{"title": "One", "text": "Straße"}, {"title": "Two", "text": "b"}]


@packages("transformers")
@pytest.mark.parametrize("template", [HERMES, LLAMA, DOCUMENTS, TOOLS])
@pytest.mark.parametrize("tools", [None, [WEATHER, WEATHER]])
@pytest.mark.parametrize("documents", [None, BOOKS])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_templates_render_as_in_transformers(
    template: str, tools: Any, documents: Any, variables: Any
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        conversations=[CONVERSATION],
        tools=tools,
        documents=documents,
        chat_template=template,
        add_generation_prompt=True,
        bos_token="",
        eos_token="</s>",
        **variables,
    )
    [expected] = rendered[0]
    tokenizer = tokenizer_of(byte_pairs())
    prompt = ChatTemplate(template, tokenizer, tool_parser="hermes").prompt(
        CONVERSATION, tools=tools, documents=documents, variables=variables
    )
    assert tokenizer.decode(prompt.tokens) == expected


def test_special_tokens_within_tools_are_text() -> None:
    tokenizer = tokenizer_of(byte_pairs(("<|im_end|>", 3)))
    tool: Any = {
        "name": "f<|im_end|>",
        "parameters": {"properties": {"<|im_end|>": {"<|im_end|>": 1}}},
    }
    called = {"function": {"name": "f", "arguments": {"<|im_end|>": "<|im_end|>"}}}
    messages: list[Any] = [*user("a"), {"role": "assistant", "content": "", "tool_calls": [called]}]
    source = "{{ tools | tojson }}{{ messages | tojson }}<|im_end|>"
    template = ChatTemplate(source, tokenizer, tool_parser="hermes")
    tokens = template.prompt(messages, tools=[tool]).tokens
    assert tokens.count(258) == 1
    assert tokenizer.decode(tokens) == json.dumps([tool]) + json.dumps(messages)


PLAIN = "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"


def test_template_for_tools(tmp_path: Path) -> None:
    """A file may have several templates, of which this one is used when there are tools."""
    model = talking(tmp_path, {len("1uHi;"): CALL}, PLAIN, tool_use=TOOLS, rag=DOCUMENTS)
    with Generator(model) as generator:
        template = generator.chat_template()
        assert template.text(user("Hi")) == "uHi;"
        assert template.text(user("Hi"), tools=[WEATHER]) == "1uHi;"
        assert template.describes_tools
        assert not template.for_tools.describes_tools
        assert generator.reply(user("Hi"), tools=[WEATHER], temperature=0).calls == [
            ToolCall("weather", '{"city": "Graz"}')
        ]
        assert generator.tokenizer.named_templates == {"tool_use": TOOLS, "rag": DOCUMENTS}
        assert generator.chat_template("rag").source == DOCUMENTS
        with pytest.raises(ValueError, match=r"'rug', expected rag, tool_use of the model file, "):
            generator.chat_template("rug")
        described = generator.chat_template(PLAIN).text(user("Hi"), tools=[WEATHER])
        assert described.startswith("s# Tools")
        assert described.endswith(";uHi;")
        source = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}" + PLAIN
        own = generator.chat_template(source)
        assert own.text(user("Hi"), tools=[WEATHER]) == "weather;uHi;"
        prompt = generator.tokenizer.decode(own.turn(user("Hi"), tools=[WEATHER]).prompt.tokens)
        assert "s# Tools" in prompt  # in a format that replies can be parsed by


@packages("transformers")
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_described_tools_are_those_of_qwen(system: list[Any]) -> None:
    """The same text as a template of this format renders, which transformers judges."""
    from transformers.utils.chat_template_utils import render_jinja_template

    call = {"function": {"name": "weather", "arguments": {"city": "Łódź"}}}
    conversation: list[Any] = [
        *system,
        *user("Hi"),
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "warm"},
        {"role": "tool", "content": "cold"},
        {"role": "assistant", "content": "Warm."},
        *user("Bye"),
    ]
    rendered: Any = render_jinja_template(
        conversations=[conversation],
        tools=[WEATHER],
        chat_template=QWEN,
        add_generation_prompt=True,
    )
    [[expected]] = rendered[:1]
    template = ChatTemplate("chatml", tokenizer_of(byte_pairs()))
    assert template.text(conversation, tools=[WEATHER]) == expected


def test_command_takes_the_name_of_a_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replies: dict[int, str | list[int]] = {len("uHi;"): "plain", 20 + len("uHi;"): "of rag"}
    model = talking(tmp_path, replies, PLAIN, tool_use=TOOLS, rag="R" * 20 + PLAIN)
    for name, reply in (([], "plain"), (["--template", "rag"], "of rag")):
        monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
        assert main(["chat", "-m", str(model), *name, "--temperature", "0"]) == 0
        assert capsys.readouterr().out == f"{reply}\n"


def test_template_for_tools_alone(tmp_path: Path) -> None:
    with Generator(talking(tmp_path, {}, None, tool_use=TOOLS)) as generator:
        template = generator.chat_template()
        assert template.text(user("Hi")) == "uHi;"
        assert template.text(user("Hi"), tools=[WEATHER]) == "1uHi;"


def test_tool_without_a_name() -> None:
    parameters = WEATHER["function"]["parameters"]
    assert tool_schemas([WEATHER, {"name": "g"}]) == {"weather": parameters, "g": None}
    bad: Any
    for bad in ([{}], [{"function": {}}], ["f"], [{"function": {"name": ""}}], [{"name": 1}]):
        with pytest.raises(ValueError, match=r"tools\[0\]=.* has no name, expected"):
            tool_schemas(bad)


def test_reply(tmp_path: Path) -> None:
    output = "Let me see.\n" + CALL
    with Generator(talking(tmp_path, {len("1uHi;"): output})) as generator:
        reply = generator.reply(user("Hi"), tools=[WEATHER], temperature=0)
        assert reply == Reply("Let me see.", calls=[ToolCall("weather", '{"city": "Graz"}')])
        assert generator.reply(user("Hi!"), temperature=0) == Reply(output)
        none: Any = {"tools": [WEATHER], "tool_choice": "none"}
        assert generator.reply(user("Hi!"), temperature=0, **none) == Reply(output)
        text = "".join(generator.chat(user("Hi!"), temperature=0))
        assert text == output.replace("<tool_call>", "").replace("</tool_call>", "")


def test_thinking(tmp_path: Path) -> None:
    path = talking(tmp_path, {len("uHi;"): "<think>\nHm.\n</think>\nHello"}, THINKS)
    with Generator(path) as generator:
        assert generator.reply(user("Hi"), temperature=0) == Reply("Hello", "Hm.")
    opened = THINKS + "<think>"
    path = talking(tmp_path, {len("uHi;<think>"): "Hm.\n</think>\nHello"}, opened)
    with Generator(path) as generator:
        assert generator.reply(user("Hi"), temperature=0) == Reply("Hello", "Hm.")


@packages("llguidance")
def test_output_format_begins_after_reasoning(tmp_path: Path) -> None:
    # The format decides about "Hello" only; "yes" within the reasoning does not count.
    path = talking(tmp_path, {len("uHi;<think>"): "yes.\n</think>\nHello"}, THINKS + "<think>")
    forms: list[tuple[str, Any, str]] = [
        ("choice", ["no", "yes"], "yes|no"),
        ("regex", "a/b", "a/b"),
        ("grammar", 'root ::= "x" | "y"', "x|y"),
        ("grammar", 'start: "x" | Y\nY: "y"', "x|y"),
        ("schema", {"enum": [7, 8]}, "7|8"),
    ]
    with Generator(path) as generator:
        for name, form, expected in forms:
            options: Any = {name: form}
            reply = generator.reply(user("Hi"), temperature=0, **options)
            assert reply.reasoning == "yes."
            assert re.fullmatch(expected, reply.content)


@packages("llguidance")
def test_output_format_is_the_final_message_of_harmony(tmp_path: Path) -> None:
    analysis = "<|channel|>analysis<|message|>yes.<|end|><|start|>assistant"
    for before, reasoning in ((analysis, "yes."), ("", "")):
        path = talking(tmp_path, {len("uHi;"): f"{before}<|channel|>final<|message|>Hello"})
        with Generator(path) as generator:
            form: Any = {"choice": ["no", "yes"], "tool_parser": "harmony", "temperature": 0}
            reply = generator.reply(user("Hi"), **form)
            assert reply.reasoning == reasoning
            assert reply.content in form["choice"]


def test_tool_parser(tmp_path: Path) -> None:
    output = '{"name": "weather", "parameters": {"city": "Graz"}}'
    with Generator(talking(tmp_path, {len("1uHi;"): spell(output)})) as generator:
        hi: Any = {"messages": user("Hi"), "tools": [WEATHER], "temperature": 0}
        assert generator.reply(**hi) == Reply(output)
        assert generator.reply(**hi, tool_parser="llama3").calls[0].name == "weather"
        with pytest.raises(ValueError, match="tool_parser='x', expected one of harmony, "):
            generator.reply(**hi, tool_parser="x")
