"""Built-in chat templates produce the models' training formats."""

from __future__ import annotations

import pytest

from h2o_cpp.model.builtin_templates import BUILTIN_TEMPLATES
from h2o_cpp.model.chat_template import ChatTemplate
from support.scripted_chat import user
from support.vocabularies import sentence_pieces
from support.vocabularies import tokenizer_of as tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATION = [
    SYSTEM,
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": " Hi "},
    {"role": "user", "content": "Who are you?"},
]

# Taken from the models' own templates and their authors' documentation; <s> and </s> are the
# vocabulary's BOS and EOS.
EXPECTED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    "<|im_start|>assistant\n Hi <|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n"
    "<start_of_turn>model\nHi<end_of_turn>\n<start_of_turn>user\nWho are you?<end_of_turn>\n"
    "<start_of_turn>model\n",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello [/INST] Hi </s>"
    "<s>[INST] Who are you? [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWho are you?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral-v1": "<s> [INST] Be brief.\n\nHello [/INST]  Hi </s> [INST] Who are you? [/INST]",
    "mistral-v3": "<s>[INST] Be brief.\n\nHello[/INST] Hi</s>[INST] Who are you?[/INST]",
    "mistral-v3-tekken": "<s>[INST]Be brief.\n\nHello[/INST] Hi </s>[INST]Who are you?[/INST]",
    "mistral-v7": "<s>[SYSTEM_PROMPT] Be brief.[/SYSTEM_PROMPT][INST] Hello[/INST]  Hi </s>"
    "[INST] Who are you?[/INST]",
    "openchat": "<s>Be brief.<|end_of_turn|>GPT4 Correct User: Hello<|end_of_turn|>"
    "GPT4 Correct Assistant:  Hi <|end_of_turn|>GPT4 Correct User: Who are you?<|end_of_turn|>"
    "GPT4 Correct Assistant:",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\n Hi <|end|>\n"
    "<|user|>\nWho are you?<|end|>\n<|assistant|>\n",
    "phi4": "<|im_start|>system<|im_sep|>Be brief.<|im_end|>"
    "<|im_start|>user<|im_sep|>Hello<|im_end|>"
    "<|im_start|>assistant<|im_sep|> Hi <|im_end|><|im_start|>user<|im_sep|>Who are you?<|im_end|>"
    "<|im_start|>assistant<|im_sep|>",
    "vicuna": "Be brief. USER: Hello ASSISTANT:  Hi </s>USER: Who are you? ASSISTANT:",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHello</s>\n<|assistant|>\n Hi </s>\n"
    "<|user|>\nWho are you?</s>\n<|assistant|>\n",
}


def test_every_template_has_expected_output() -> None:
    assert list(EXPECTED) == list(BUILTIN_TEMPLATES)


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_rendered_conversation(name: str) -> None:
    t = tokenizer(sentence_pieces(add_bos_token=False))
    template = ChatTemplate(name, t)

    def ids(text: str) -> list[int]:
        return t.encode(text, add_special=False, parse_special=True)

    assert template.tokens(CONVERSATION) == ids(EXPECTED[name])
    without_system = EXPECTED[name]
    for text in ("<<SYS>>\nBe brief.\n<</SYS>>\n\n", "Be brief.\n\n"):
        without_system = without_system.replace(text, "")
    if "Be brief." not in without_system:  # the system prompt is part of the first message
        assert template.tokens(CONVERSATION[1:]) == ids(without_system)


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_conversation_prefix_is_stable(name: str) -> None:
    """The tokens of the first turns are a prefix of the tokens of the whole conversation."""
    t = tokenizer(sentence_pieces(add_bos_token=False))
    template = ChatTemplate(name, t)
    before, after = template.tokens(CONVERSATION[:2]), template.tokens(CONVERSATION)
    assert after[: len(before)] == before
    rest = template.prompt_after_reply(CONVERSATION[:2], user("Who are you?")).tokens
    assert after[-len(rest) :] == rest


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_final_message_is_continued(name: str) -> None:
    """The prompt is the beginning of the conversation with the message."""
    t = tokenizer(sentence_pieces(add_bos_token=False))
    template = ChatTemplate(name, t)
    messages = [*CONVERSATION[:2], {"role": "assistant", "content": "Hi, I"}]
    whole = template.text([*messages, *user("Who?")])
    expected = whole.partition("Hi, I")[0] + "Hi, I"
    assert template.text(messages, continue_final_message=True) == expected
    prompt = template.prompt(messages, continue_final_message=True)
    assert prompt.tokens == t.encode(expected, add_special=False, parse_special=True)
