"""The assistant's final message is continued: the prompt, and the rest of the reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from h2o_cpp.model.builtin_templates import BUILTIN_TEMPLATES
from h2o_cpp.model.chat_template import ChatTemplate
from h2o_cpp.reply import Reply, ToolCall
from support.needs import packages
from support.scripted_chat import CHATML, user
from support.tool_talk import HERMES, LLAMA, THINKS, TOOLS, WEATHER, spell, talking
from support.vocabularies import byte_pairs
from support.vocabularies import tokenizer_of as tokenizer

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Graz"}}</tool_call>'
CALLED = ToolCall("weather", '{"city": "Graz"}')

# The forms of Qwen3, DeepSeek-R1 and gpt-oss, abridged.
CLOSED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ m.content.lstrip('\n') }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
OPENED = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}") + "{# </think> #}"
HARMONY = """{% for m in messages %}<|start|>{{ m.role }}
{%- if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
BEGIN = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"


def begun(text: str) -> list[dict[str, Any]]:
    return [*user("Hi"), {"role": "assistant", "content": text}]


@packages("transformers")
@pytest.mark.parametrize("template", [*BUILTIN_TEMPLATES.values(), HERMES, LLAMA, TOOLS, THINKS])
@pytest.mark.parametrize("text", ["ab", "ab <tool_call>", "a\n b, <b>"])
def test_continued_message_as_in_transformers(template: str, text: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = begun(text)
    rendered: Any = render_jinja_template(
        conversations=[messages],
        chat_template=template,
        continue_final_message=True,
        bos_token="",
        eos_token="</s>",
    )
    chat = ChatTemplate(template, tokenizer(byte_pairs()))
    assert [chat.text(messages, continue_final_message=True)] == rendered[0]


class TestFinalMessageIsContinued:
    """The prompt ends after its text."""

    def chat(self, template: str) -> ChatTemplate:
        return ChatTemplate(template, tokenizer(byte_pairs(("<|im_start|>", 3), ("<|im_end|>", 3))))

    def text(self, template: str, content: str, **options: Any) -> str:
        return self.chat(template).text(begun(content), continue_final_message=True, **options)

    @pytest.mark.parametrize("content", ["ab", " \n ab \n", "\n", "<|im_end|>", "</think>"])
    def test_text_is_exact(self, content: str) -> None:
        """Even if the template strips it, or ends generation prompts with white space."""
        assert self.text(CHATML, content) == BEGIN + content
        assert self.text(CHATML + "\n\n", content) == BEGIN + content
        stripped = CHATML.replace("message['content']", "message['content'] | trim")
        assert self.text(stripped, content) == BEGIN + content

    def test_text_without_effect(self) -> None:
        assert self.text(CHATML, "") == self.chat(CHATML).text(user("Hi")) == BEGIN

    @pytest.mark.parametrize(
        ("template", "text", "variables", "expected", "thinking"),
        [
            # Reasoning is over where the text begins, however the template says so.
            (CLOSED, "ab", {}, BEGIN + NO_THOUGHT + "ab", False),
            (CLOSED, "ab", {"enable_thinking": False}, BEGIN + NO_THOUGHT + "ab", False),
            (OPENED, "ab", {}, BEGIN + "ab", False),
            (CLOSED + "<think>", "ab", {}, BEGIN + NO_THOUGHT + "ab", False),
            # Reasoning is continued.
            (CLOSED, "<think>\nHm", {}, BEGIN + "<think>\nHm", True),
            (OPENED, "<think>\nHm", {}, BEGIN + "<think>\nHm", True),
            (CLOSED, "<think>Hm</think>ab", {}, BEGIN + "<think>Hm</think>ab", False),
            # The generation prompt is not left out.
            (
                CHATML.replace("assistant\n' }}", "assistant\n<think></think>' }}"),
                "ab",
                {},
                BEGIN + "<think></think>ab",
                False,
            ),
        ],
    )
    def test_reasoning(
        self, template: str, text: str, variables: Any, expected: str, thinking: bool
    ) -> None:
        assert self.text(template, text, variables=variables) == expected
        prompt = self.chat(template).prompt(
            begun(text), variables=variables, continue_final_message=True
        )
        assert prompt.thinking == thinking

    def test_reasoning_before_the_text(self) -> None:
        reply = {"role": "assistant", "content": "ab", "reasoning_content": "Hm"}
        text = self.chat(CLOSED).text([*user("Hi"), reply], continue_final_message=True)
        assert text == BEGIN + "<think>\nHm\n</think>\n\nab"

    def test_header_of_the_message(self) -> None:
        prompt = self.chat(HARMONY).prompt(begun("ab"), continue_final_message=True)
        assert prompt.begun == "<|channel|>final<|message|>ab"

    def test_special_tokens_are_markers_of_the_reply(self) -> None:
        """Also after text that is tokenized with the template's."""
        t = tokenizer(byte_pairs(("<|im_end|>", 3), ("<tool_call>", 3), ("</think>", 4)))
        reply = {"role": "assistant", "content": "b<tool_call><|im_end|></think>"}
        messages = [*user("<tool_call>"), reply]
        source = (
            "{{ messages[0].content }}a{% if messages[1] %}{{ messages[1].content }}{% endif %}"
        )
        for comment, tokens in (
            ("</think>", [257, 259, 260]),
            ("[TOOL_CALLS]</think>", [257, 260]),
        ):
            template = ChatTemplate(f"{source}{{# {comment}</think> #}}", t)
            prompt = template.prompt(messages, continue_final_message=True)
            assert template.text(messages, continue_final_message=True) == (
                "<tool_call>ab<tool_call><|im_end|></think>"
            )
            assert [i for i in prompt.tokens if i > 256] == tokens

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            (user("Hi"), r"messages\[0\] cannot be continued: its role is 'user', expected"),
            ([{"role": "assistant", "content": "a"}], "there is no message before it"),
            (
                [*user("Hi"), *[{"role": "assistant", "content": "a"}] * 2],
                r"messages\[2\] cannot be continued: the message before it is also the assistant's",
            ),
            (
                [*user("Hi"), {"role": "assistant", "content": "a", "tool_calls": [{}]}],
                r"messages\[1\] cannot be continued: it has tool calls",
            ),
            ([*user("Hi"), {"role": "assistant"}], "its content is None, expected text"),
            (
                [*user("Hi"), {"role": "assistant", "content": "", "reasoning_content": "a"}],
                "it has reasoning but no text",
            ),
        ],
    )
    def test_messages_that_cannot_be_continued(self, messages: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            self.chat(CHATML).prompt(messages, continue_final_message=True)

    def test_wrong_arguments(self) -> None:
        with pytest.raises(TypeError, match="continue_final_message='yes', expected True or False"):
            self.chat(CHATML).prompt(user("Hi"), continue_final_message="yes")  # type: ignore[arg-type]

    def test_template_that_renders_earlier_messages_differently(self) -> None:
        """Mistral's are such, which have the system's message before the last one only."""
        template = """{% for m in messages if m.role != 'system' %}
{{ (messages[0].content ~ ' ' if loop.last else '') ~ m.content }}{% endfor %}"""
        messages = [{"role": "system", "content": "Be brief."}, *begun("ab")]
        text = self.chat(template).text(messages, continue_final_message=True)
        assert text == "Be brief. Hiab"


@pytest.mark.parametrize(
    ("beginning", "tools", "output", "expected"),
    [
        ("Let me", [], " see.", Reply(" see.")),
        ("Let me <tool", [WEATHER], "box>", Reply("box>")),
        ("Ok <tool_call>{", [WEATHER], CALL.partition("{")[2], Reply(calls=[CALLED])),
        ("<think>Hm", [], " hm.</think>Hello", Reply("Hello", " hm.")),
        ("<think></think>Let", [], " go", Reply(" go")),
    ],
)
def test_continued_reply(
    tmp_path: Path, beginning: str, tools: Any, output: str, expected: Reply
) -> None:
    """Only the rest is returned; a call that begins in the message is complete."""
    is_reasoning = beginning.startswith("<think>")
    prompt = f"{'1' if tools else ''}uHi;{'' if is_reasoning else 'a'}{beginning}"
    options: Any = {"tools": tools, "temperature": 0}
    with Generator(talking(tmp_path, {len(spell(prompt)): output}, THINKS)) as generator:
        messages = begun(beginning)
        assert generator.reply(messages, continue_final_message=True, **options) == expected
        assert generator.reply(messages, **options) != expected


def test_continued_chat(tmp_path: Path) -> None:
    with Generator(talking(tmp_path, {len("uHi;aLet me"): " see."})) as generator:
        stream = generator.chat(begun("Let me"), continue_final_message=True, temperature=0)
        assert "".join(stream) == " see."
        assert generator.tokenizer.decode(stream.history) == "uHi;aLet me see."


@packages("llguidance")
def test_output_format_of_a_continued_reply(tmp_path: Path) -> None:
    """It constrains what is generated, from the beginning unless that is reasoning."""
    path = talking(tmp_path, {len("uHi;<think>Hm"): "yes.</think>Hello"}, THINKS)
    form: Any = {"choice": ["no", "yes"], "continue_final_message": True, "temperature": 0}
    with Generator(path) as generator:
        reply = generator.reply(begun("<think>Hm"), **form)
        assert reply.reasoning == "yes."
        assert reply.content in form["choice"]
        assert generator.reply(begun("Say:"), **form).content in form["choice"]
        harmony = "{{ messages[0].content }}{% if not add_generation_prompt %}<|channel|>final"
        harmony += "<|message|>{{ messages[1].content }}{% endif %}"
        reply = generator.reply(begun("Say:"), template=harmony, **form)
        assert reply.content in form["choice"]


@packages("llguidance")
def test_required_call_after_the_beginning_of_a_reply(tmp_path: Path) -> None:
    with Generator(talking(tmp_path, {}, THINKS)) as generator:
        given: Any = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 100}
        given |= {"continue_final_message": True, "temperature": 0}
        with pytest.raises(ValueError, match="a required tool call cannot continue the final"):
            generator.reply(begun("Let me"), **given)
        reply = generator.reply(begun("<think>Hm"), **given)
        assert reply.content == ""
