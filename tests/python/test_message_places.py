"""Where messages are in a conversation's tokens, and how much of each the cache keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from h2o_cpp import Chat, Generator
from h2o_cpp.cli.forgotten import described, lost_messages
from h2o_cpp.generation.prompt_memory import PromptMemory
from h2o_cpp.model.builtin_templates import BUILTIN_TEMPLATES
from h2o_cpp.model.chat_template import ChatTemplate
from h2o_cpp.model.message_places import Places
from h2o_cpp.model.tokenizer import Tokenizer, _EncodedParts
from support.scripted_chat import CHATML, PLAIN, says, user
from support.vocabularies import byte_pairs, sentence_pieces
from support.vocabularies import tokenizer_of as tokenizer

GEMMA_2 = """{% if messages[0].role == 'system' %}
{{ raise_exception('System role not supported') }}
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}
{% endfor %}assistant:"""

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief, é and ü."},
    {"role": "user", "content": "Where is the ship?"},
    {"role": "assistant", "content": "<|im_start|>at sea"},
    {"role": "user", "content": "at sea"},
]


def texts(tokenizer: Tokenizer, tokens: list[int], places: Places) -> str:
    return "".join(tokenizer.spell(tokens[begin:end]) for begin, end in places)


@pytest.mark.parametrize("template", [CHATML, PLAIN, GEMMA_2, *BUILTIN_TEMPLATES])
@pytest.mark.parametrize("vocabulary", [byte_pairs, sentence_pieces])
def test_every_message_is_found(template: str, vocabulary: Any) -> None:
    """The tokens have the message's text, and of the text around it at most what shares a token."""
    one = tokenizer(vocabulary())
    prompt = ChatTemplate(template, one).prompt(CONVERSATION)
    assert len(prompt.messages) == len(CONVERSATION)
    for message, places in zip(CONVERSATION, prompt.messages, strict=True):
        found, wanted = texts(one, prompt.tokens, places), message["content"]
        assert wanted in found
        assert len(found) <= len(wanted) + 2
    used = [range(begin, end) for places in prompt.messages for begin, end in places]
    assert len({i for span in used for i in span}) == sum(map(len, used))


def test_a_message_that_is_continued() -> None:
    one = tokenizer(byte_pairs())
    template = ChatTemplate(CHATML, one)
    given = [*CONVERSATION, {"role": "assistant", "content": "In the port"}]
    prompt = template.prompt(given, continue_final_message=True)
    assert texts(one, prompt.tokens, prompt.messages[-1]) == "In the port"


def test_messages_that_the_template_repeats_moves_and_leaves_out() -> None:
    source = "{{ messages[1].content }}|{{ messages[0].content }}|{{ messages[1].content[1:] }}"
    one = tokenizer(byte_pairs())
    prompt = ChatTemplate(source, one).prompt(CONVERSATION)
    found = [texts(one, prompt.tokens, places) for places in prompt.messages]
    ship = CONVERSATION[1]["content"]
    assert found == [CONVERSATION[0]["content"], ship + ship[1:], "", ""]


def test_calls_are_found() -> None:
    one = tokenizer(byte_pairs())
    call = {"function": {"name": "ship", "arguments": {"port": "x"}}}
    given = [*CONVERSATION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for source in ("{{ function | tojson }}", "{{ function.name }}"):
        source = "{% set function = messages[4].tool_calls[0].function %}" + source
        prompt = ChatTemplate(source, one).prompt(given)
        assert "ship" in texts(one, prompt.tokens, prompt.messages[4])


def shares(generator: Generator, places: Places) -> float:
    """The share of tokens that any head keeps now."""
    stats = generator.stats()
    kept = {
        int(position)
        for layer in range(stats.n_layers)
        for head in range(stats.n_kv_heads)
        for position in generator.kept(layer, head)[0]
    }
    tokens = [i for begin, end in places for i in range(begin, end)]
    return sum(i in kept for i in tokens) / len(tokens)


@pytest.mark.parametrize("system", [None, "Be very brief."])
def test_chat_reports_the_share_of_each_message(
    system: str | None, tiny_opt: Path, tmp_path: Path
) -> None:
    """Also after another use of the model, in a copy and in a saved conversation."""
    options: Any = {"max_tokens": 6, "ignore_eos": True, "seed": 1}
    with Generator(tiny_opt, hh=12, n_batch=8, threads=1) as generator:
        chat = Chat(generator, template=PLAIN, system=system)
        for turn in range(4):
            if turn == 2:
                chat.save(tmp_path / "a.chat")
                chat = chat.fork()
            if turn == 3:
                generator.generate("The", max_tokens=2)
                chat = Chat.load(generator, tmp_path / "a.chat", template=PLAIN)
            n_messages = len(chat.messages) + 1
            stream = chat.say(f"Go on, {turn}", **options)
            assert not stream.prompt_memory.messages
            list(stream)
            found = stream.generation().prompt_memory.messages
            parts = stream.request.parts
            assert len(found) == n_messages
            for message, places, share in zip(chat.messages, parts.messages, found, strict=False):
                text = texts(generator.tokenizer, stream.history, places)
                assert message["content"].strip() in text
                assert share == shares(generator, places)
        assert 1 in found
        assert any(share < 1 for share in found if share is not None)


def test_everything_is_kept_by_a_full_cache(tmp_path: Path) -> None:
    with says(tmp_path, {"Hi": "Hello!", "Bye": "."}) as generator:
        chat = Chat(generator)
        for message, n in (("Hi", 1), ("Bye", 3)):
            stream = chat.say(message)
            list(stream)
            assert stream.prompt_memory.messages == (1.0,) * n
        assert not generator.chat(user("Hi")).prompt_memory.messages


def test_lost_messages() -> None:
    """Whole earlier turns are lost, and instructions; not half a turn, or the question."""
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    messages = [{"role": role, "content": f"{i} " * 30} for i, role in enumerate(roles)]

    def note(*shares: float | None, dropped: int = 0, archived: int = 0) -> str:
        memory = PromptMemory(dropped, 9, archived, shares)
        lost = lost_messages(messages, memory)
        return described(messages, lost, memory) if lost else ""

    assert note(1, 1, 1, 1, 1, 1) == note(1, 0, 0.1, 0, 0.1, 0) == note() == ""
    assert note(None, 1, 1, 1, 1, 1) == ""
    of_one = "'1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 ...'"
    system = "the system prompt (--protect system keeps it)"
    assert note(1, 0, 0, 1, 1, 1) == f"the model has forgotten {of_one}"
    assert note(0, 0.5, 0, 1, 1, 1) == f"the model has forgotten {system}"
    assert note(0, 0, 0, 0, 0, 0, archived=9) == (
        f"the model has only in its archive {system} and 2 earlier turns, up to "
        f"{of_one.replace('1', '3')}"
    )
    assert note(1, None, None, 1, 1, 1, dropped=9) == f"the model no longer reads {of_one}"


def test_texts_of_earlier_turns_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of them is bounded, and the tokens are those without it."""
    one = tokenizer(byte_pairs())
    texts: list[str] = []

    def encode(text: str, **options: Any) -> list[int]:
        texts.append(text)
        return one.core.encode(text, **options)

    counted = SimpleNamespace(encode=encode, byte_lengths=one.core.byte_lengths)
    monkeypatch.setattr(one._encoded, "_core", counted)
    first = one.encode_parts(["Where?", 256, "At sea."])
    assert one.encode_parts(["Where?", 256, "At sea.", 256, "And?"]) == [*first, 256, *b"And?"]
    assert texts == ["Where?", "At sea.", "And?"]
    with pytest.raises(ValueError, match="more than 3 tokens"):
        one.encode_parts(["Where?"], most=3)
    monkeypatch.setattr(_EncodedParts, "_MOST", 16 * 2 * len("Where?"))
    many = [f"{i:06}" for i in range(17)]
    for text in [*many, *many, "too long for it", "too long for it"]:
        one.encode_parts([text])
    assert one._encoded._size == sum(2 * len(text) for text, _ in one._encoded._found) <= 192
    assert texts.count(many[0]) == texts.count("too long for it") == 2


def test_texts_of_few_tokens_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of unknown characters may be one token, or none."""
    one = tokenizer(byte_pairs())
    monkeypatch.setattr(_EncodedParts, "_MOST", 1600)
    few = SimpleNamespace(encode=lambda text, **options: [1], byte_lengths=one.core.byte_lengths)
    monkeypatch.setattr(one._encoded, "_core", few)
    for i in range(100):
        one.encode_parts([f"{i:050}"])
        one.encode_parts([f"{i:0100}"])
    assert {len(text) for text, _ in one._encoded._found} == {50}
    assert len(one._encoded._found) == 1600 // 51
