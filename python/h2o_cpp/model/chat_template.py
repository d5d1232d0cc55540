"""A file's chat template: from messages to the text, and the tokens, that the model reads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from h2o_cpp.tokenizer import TextTokenizer
from h2o_cpp.tokenizer.special_tokens import unused_characters

Message = Mapping[str, Any]  # {"role": "user", "content": "Hello"}

_MAX_CHARACTERS = 1 << 24  # of a rendered conversation
_MAX_SECONDS = 10.0  # that rendering one takes

# What running a template on messages that it does not expect can raise.
_ERRORS = (
    TemplateError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """A Jinja2 template, run in a sandbox with what Hugging Face transformers gives it.

    Only the template's own text makes special tokens; text in messages never does.
    """

    def __init__(self, source: str | None, tokenizer: TextTokenizer) -> None:
        """`source`: the template; default: the one that the model's file has."""
        source = tokenizer.chat_template if source is None else source
        if source is None:
            raise ValueError(
                "the model has no chat template (tokenizer.chat_template): give one "
                "(template=, on the command line --template), or use stream()"
            )
        if "{{" not in source and "{%" not in source:
            raise ValueError(
                "the chat template has no {{ or {%: not a template; @FILE reads one from a file"
            )
        try:
            self._environment = _Environment()
            parsed = self._environment.parse(source)
            constants = parsed.find_all(nodes.Const)
            self._literals = {str(constant.value) for constant in constants}
            self._template = self._environment.from_string(_with_checks(parsed))
        except (TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template is not valid Jinja2: {error}") from None
        self._source = source
        self._tokenizer = tokenizer

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, up to where the assistant speaks next."""
        unused = unused_characters([self._source, *_texts(messages)])
        return self._tokenizer.encode_chat(self._parts(messages, unused))

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
        """The conversation as special tokens and the strings between them."""
        special, spell = self._tokenizer.special, self._tokenizer.token_text
        # What the template looks for in a message it must find there: "<think>", say.
        disguise = special.disguise(unused, self._literals)
        rendered = self._render(
            messages=_map_texts(messages, disguise.put_on),
            add_generation_prompt=True,
            bos_token=spell(self._tokenizer.bos),
            eos_token=spell(self._tokenizer.eos),
            tools=None,
            documents=None,
        )
        for part in special.split(rendered):
            yield disguise.take_off(part) if isinstance(part, str) else part

    def _render(self, **variables: Any) -> str:
        pieces: list[str] = []
        size = 0
        self._environment.begin()
        try:
            for piece in self._template.generate(**variables):
                pieces.append(piece)
                size += len(piece)
                if size > _MAX_CHARACTERS:
                    raise ValueError(
                        f"the chat template makes more than {_MAX_CHARACTERS} characters"
                    )
        except _ERRORS as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None
        return "".join(pieces)


class _Generation(Extension):
    """{% generation %}, by which templates for training mark what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """What templates run in. It knows how long they have been at it, in each thread."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._deadline = threading.local()

    def begin(self) -> None:
        self._deadline.at = time.monotonic() + _MAX_SECONDS

    def check(self) -> None:
        if time.monotonic() > self._deadline.at:
            raise TemplateError(f"it takes more than {_MAX_SECONDS:g} seconds")


def _with_checks(template: nodes.Template) -> nodes.Template:
    """The template, which looks at the time in each round of a loop and call of a macro."""
    blocks: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
        *template.find_all(nodes.For),
        *template.find_all(nodes.Macro),
        *template.find_all(nodes.CallBlock),
    ]
    for block in blocks:
        check = nodes.Call(nodes.EnvironmentAttribute("check"), [], [], None, None)
        block.body.insert(0, nodes.ExprStmt(check, lineno=block.lineno))
    return template


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


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
