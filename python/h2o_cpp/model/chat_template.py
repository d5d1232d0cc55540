"""A file's chat template: from messages to the text, and the tokens, that the model reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from h2o_cpp.model.arguments import check_str, short
from h2o_cpp.model.builtin_templates import BUILTIN_TEMPLATES
from h2o_cpp.model.disguise import Disguise, unused_characters
from h2o_cpp.model.jinja_template import JinjaTemplate
from h2o_cpp.model.tokenizer import Tokenizer

_EXPECTED = f"one of {', '.join(BUILTIN_TEMPLATES)} or Jinja2 with {{{{ or {{%"

Message = Mapping[str, Any]  # {"role": "user", "content": "Hello"}

_MESSAGES = "expected a list of messages such as {'role': 'user', 'content': 'Hello'}"


def is_jinja(text: str) -> bool:
    """Whether a text is a template, and not the name of one."""
    return "{{" in text or "{%" in text


class ChatTemplate:
    """A Jinja2 template, run in a process of its own with what Hugging Face transformers gives it.

    Only the template's own text makes special tokens; text in messages never does.
    """

    def __init__(self, source: str | None, tokenizer: Tokenizer) -> None:
        """`source`: the template, or the name of a built-in one; default: the model file's own."""
        source = tokenizer.chat_template if source is None else source
        if source is not None:
            check_str("template", source)
        if source is None:
            raise ValueError(
                "the model has no chat template (tokenizer.chat_template): give the one that it "
                f"was trained with by template= (--template), {_EXPECTED}; or use stream()"
            )
        source = BUILTIN_TEMPLATES.get(source, source)
        if not is_jinja(source):
            raise ValueError(f"template={source!r}, expected {_EXPECTED}")
        self._template = JinjaTemplate(source)
        self._source = source
        self._tokenizer = tokenizer

    def tokens(self, messages: Sequence[Message], *, most: int | None = None) -> list[int]:
        """Tokens of a conversation, up to where the assistant speaks next.

        most: as for Tokenizer.encode.
        """
        _check_messages(messages)
        unused = unused_characters([self._source, *_texts(messages)])
        return self._tokenizer.encode_chat(self._parts(messages, unused), most=most)

    def tokens_after_reply(self, before: Sequence[Message], after: Sequence[Message]) -> list[int]:
        """What follows a reply of the assistant between `before` and `after`, as tokens.

        The reply itself stays as the model generated it, whatever the template would make of it.
        """
        unused = unused_characters([self._source, *_texts(before), *_texts(after)])
        mark = next(unused)
        reply = {"role": "assistant", "content": mark}
        parts = self._parts([*before, reply, *after], unused)
        rest: list[int | str] = []
        found = 0
        for part in parts:
            if isinstance(part, str) and mark in part:
                found += part.count(mark)
                rest = [part.rpartition(mark)[2]]
            else:
                rest.append(part)
        tokens = self._tokenizer.encode_parts(rest, begins=False)
        if found != 1 or not tokens:
            raise ValueError(
                "the chat template does not put a reply once, and messages after it: "
                "the conversation cannot be continued"
            )
        return tokens

    def _parts(self, messages: Sequence[Message], unused: Iterator[str]) -> Iterator[int | str]:
        """The conversation as special tokens and the texts between them."""
        tokenizer = self._tokenizer
        # What the template looks for in a message it must find there: "<think>", say.
        disguise = Disguise(tokenizer.special_texts, unused, kept=self._template.literals)
        rendered = self._template.render(
            messages=_map_texts(messages, disguise.put_on),
            add_generation_prompt=True,
            bos_token=tokenizer.token_text(tokenizer.bos),
            eos_token=tokenizer.token_text(tokenizer.eos),
            tools=None,
            documents=None,
        )
        for part in tokenizer.split_special(rendered):
            yield disguise.take_off(part) if isinstance(part, str) else part


def _check_messages(messages: object) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise TypeError(f"messages={short(messages)}, {_MESSAGES}")
    if not messages:
        raise ValueError(f"messages is empty, {_MESSAGES}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{i}]={short(message)}, {_MESSAGES}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}]={short(message)} has no role, {_MESSAGES}")


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string in it changed, but not the keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_texts(item, change) for item in value]
    return value


def _texts(value: Any) -> list[str]:
    """Every string in `value`, but not the keys."""
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    _map_texts(value, collect)
    return texts
