"""Chat templates: from messages to the text and tokens that the model reads."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, groupby, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from h2o_cpp.arguments import check_bool, check_str, short
from h2o_cpp.files.text_files import read_text
from h2o_cpp.model.builtin_templates import BUILTIN_TEMPLATES
from h2o_cpp.model.chat_turn import ChatPrompt, ChatTurn, Tool
from h2o_cpp.model.described_tools import with_described_tools
from h2o_cpp.model.jinja_template import JinjaTemplate
from h2o_cpp.model.marked_text import (
    MESSAGE,
    NAME,
    REPLY,
    TEMPLATE,
    VALUE,
    MarkedText,
    joined,
    runs,
)
from h2o_cpp.model.message_places import message_places
from h2o_cpp.model.special_escape import SpecialTokenEscape, unused_characters
from h2o_cpp.model.template_messages import ORIGIN, Message, for_template, text_to_continue
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.reply import GENERIC, ReplyFormat, format_named, format_of

_EXPECTED = f"one of {', '.join(BUILTIN_TEMPLATES)}, a file or Jinja2 with {{{{ or {{%"

# Stands for a reply, and is found where it is rendered.
_REPLY: Message = {"role": "assistant", "content": MarkedText("(reply)", REPLY)}

_TOOL_USE = "tool_use"  # the name of a template in files of Hermes and Command R

_MESSAGES = "expected a list of messages such as {'role': 'user', 'content': 'Hello'}"


def is_jinja(text: str) -> bool:
    """Whether a text is a template rather than a template's name."""
    return "{{" in text or "{%" in text


def read_template(
    template: str,
    folder: str | os.PathLike[str] = "",
    *,
    named: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The text of a template: `template` itself, or that of this name or file.

    folder: where relative files are.
    named: templates of the model file by name.

    Raises ValueError, and OSError for a file that cannot be read.
    """
    if is_jinja(check_str("template", template)):
        return template
    if template in named:
        return named[template]
    if template in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[template]
    file = os.path.join(folder, template)
    text = read_text(Path(file)) if os.path.isfile(file) else ""
    if not is_jinja(text):
        of_file = f"{', '.join(sorted(named))} of the model file, " if named else ""
        raise ValueError(f"template={short(template)}, expected {of_file}{_EXPECTED}")
    return text


class _Rendered(NamedTuple):
    """A rendered conversation, then `final`, the text of the message to continue."""

    text: str
    thinking: bool
    final: str = ""
    begun: str = ""


class ChatTemplate:
    """A Jinja2 template with the environment of Hugging Face transformers, run in a subprocess.

    Special tokens come only from the template's own text, never from messages and tools. In the
    text of a message that is continued, the markers of reasoning and of tool calls are tokens too,
    as in a reply.

    Attributes: `source`; `format`, the format of reasoning and tool calls; `has_tools`, whether the
    template supports tools in this format, rather than as text; `for_tools`, the template of
    conversations with tools, which the model file may have beside this one.
    """

    def __init__(
        self, source: str | None, tokenizer: Tokenizer, *, tool_parser: str | None = None
    ) -> None:
        """source: as for read_template(), or the name of a template in the model file; default:
            the model's own template.

        tool_parser: a name from h2o_cpp.reply.FORMATS; default: from the template.
        """
        named = tokenizer.named_templates
        own = tokenizer.chat_template or named.get(_TOOL_USE)
        self.for_tools = self
        if source is None and _TOOL_USE in named:
            self.for_tools = ChatTemplate(_TOOL_USE, tokenizer, tool_parser=tool_parser)
        if source is not None:
            source = read_template(source, named=named)
        elif own is None:
            raise ValueError(
                "the model has no chat template (tokenizer.chat_template), expected template= "
                f"{_EXPECTED}; without one, use stream()"
            )
        else:
            source = BUILTIN_TEMPLATES.get(own, own)  # a model must not name files
            if not is_jinja(source):
                raise ValueError(f"the model's chat template is {short(own)}, expected Jinja2")
        self._template = JinjaTemplate(source)
        self.source = source
        self._tokenizer = tokenizer
        self.format: ReplyFormat = format_of(source)
        if tool_parser is not None:
            self.format = format_named(tool_parser, source)
        self.has_tools: bool = "tools" in source and not self.describes_tools
        if self.for_tools is not self:
            self.has_tools = self.for_tools.has_tools

    @property
    def describes_tools(self) -> bool:
        """Whether tools, and then calls and results, are text in the messages."""
        return self.format.name == GENERIC.name

    @property
    def spelled(self) -> list[int]:
        """The special tokens of the format's markers."""
        return [*self._marker_tokens().values()]

    def _marker_tokens(self) -> dict[str, int]:
        tokens = ((marker, self.special_token(marker)) for marker in self.format.markers)
        return {marker: token for marker, token in tokens if token is not None}

    @property
    def end_tokens(self) -> Collection[int]:
        """The tokens that end a reply."""
        return self._tokenizer.end_tokens

    def special_token(self, marker: str) -> int | None:
        """The special token of this text; None: there is none."""
        parts = self._tokenizer.split_special(marker)
        return parts[0] if len(parts) == 1 and isinstance(parts[0], int) else None

    def marker_token(self, marker: str) -> int | None:
        """The token of this text, special or not; None: there is none."""
        if (token := self.special_token(marker)) is not None:
            return token
        ids = self._tokenizer.encode(marker, add_special=False, begins=False)
        return ids[0] if len(ids) == 1 else None

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, up to the assistant's next reply."""
        return self.prompt(messages).tokens

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        most: int | None = None,
    ) -> ChatPrompt:
        """A conversation up to the assistant's next reply, tokenized.

        tools, documents, variables: for the template, as in transformers' apply_chat_template;
            variables are its keyword arguments, such as enable_thinking.
        continue_final_message: the last message is the assistant's, and the prompt ends after its
            text, for the model to continue it.
        most: as for Tokenizer.encode.

        Raises ValueError if the template rejects them, and for a message that cannot be continued.
        """
        one = self.for_tools if tools else self
        given = one._given(
            messages, tools, documents, variables, continue_final_message,
            describe=one.describes_tools,
        )  # fmt: skip
        parts = [*_joined(chain(one._parts(given.text), one._final_parts(given.final)))]
        each = [*self._tokenizer.encode_each(parts, most=most)]
        after = [*chain.from_iterable(one.tokens for one in each)]
        tokens = self._tokenizer.begun(after)
        text = given.text
        if given.final:
            text = joined((text, MarkedText(given.final, MESSAGE + len(messages) - 1)))
        places = message_places(
            text, len(messages), parts, each, self._tokenizer, begin=len(tokens) - len(after)
        )
        return ChatPrompt(tokens, given.thinking, given.begun, one._replies(tokens), places)

    def turn(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None, **options: Any
    ) -> ChatTurn:
        """Returns prompt() with these arguments, and the form of the reply to it."""
        prompt = self.prompt(messages, tools=tools, **options)
        return ChatTurn(self.for_tools if tools else self, prompt, tools or ())

    def n_before(self, tokens: Sequence[int], messages: Sequence[Message], **options: Any) -> int:
        """How many of `tokens`, those of prompt(messages, **options), come before the first message
        that is not the system's: the system prompt, and the tools if they come first.
        """
        n_system = next((i for i, one in enumerate(messages) if one["role"] != "system"), 0)
        content = messages[n_system]["content"]
        text = content if isinstance(content, str) else ""
        other: Message = {"role": "user", "content": f"-{text}"}
        options["continue_final_message"] = False
        others = self.prompt([*messages[:n_system], other], **options).tokens
        pairs = enumerate(zip(tokens, others, strict=False))
        return next((i for i, (one, two) in pairs if one != two), 0)

    def _replies(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Where replies begin and end in a conversation: after the tokens that end a prompt, and at
        the next end token. Empty if the template has none.
        """
        found = []
        begins = [*_places(self._opening, tokens)]
        for begin, following in zip_longest(begins, begins[1:]):
            ends = (i for i in range(begin, following or len(tokens)) if tokens[i] in self._ends)
            end = next(ends, None)
            if end is None and following is not None:
                return []
            found.append((begin, len(tokens) if end is None else end))
        return [span for span in found if span[0] < len(tokens)]

    @cached_property
    def _ends(self) -> Collection[int]:
        return frozenset(self.end_tokens)

    @cached_property
    def _opening(self) -> list[int]:
        """The tokens between the text of the user's message and the reply."""
        try:
            rendered = self._render([{"role": "user", "content": "Hello"}], {})
        except ValueError:
            return []
        begin = end = 0
        for origin, length in runs(rendered):
            end += length
            begin = end if origin == VALUE or origin >= MESSAGE else begin
        return self._tokenizer.encode_parts(_joined(self._parts(rendered[begin:])), begins=False)

    def prompt_after_reply(
        self,
        before: Sequence[Message],
        after: Sequence[Message],
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Returns the text after a reply between `before` and `after`; variables: as for prompt().

        The reply itself is not rendered, so that it stays as the model generated it.
        """
        rendered = self._render([*before, _REPLY, *after], variables or {})
        spans = _reply_spans(rendered)
        begin, end = spans[0] if len(spans) == 1 else (0, 0)
        rest = [*_joined(self._parts(rendered[end:]))]
        each = [*self._tokenizer.encode_each(rest, begins=False)]
        tokens = [*chain.from_iterable(one.tokens for one in each)]
        if end - begin != len(_REPLY["content"]) or not tokens:
            raise ValueError(
                "the chat template cannot continue a conversation: it must render a reply exactly "
                "once, followed by the next messages"
            )
        n = len(before) + 1 + len(after)
        places = message_places(rendered[end:], n, rest, each, self._tokenizer)
        return ChatPrompt(tokens, self._thinks(rendered), messages=places)

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The rendered conversation, in which text from messages may look like special tokens.

        A template that renders tools itself renders them here, also if the format of its calls is
        unknown, for which prompt() describes another one.
        """
        one = self.for_tools if tools else self
        given = one._given(
            messages, tools, documents, variables, continue_final_message,
            describe=one.describes_tools and "tools" not in one.source,
        )  # fmt: skip
        return str.__str__(given.text) + given.final

    def _given(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        continued: bool,
        *,
        describe: bool,
    ) -> _Rendered:
        _check_messages(messages)
        given = {**(variables or {}), "tools": tools or None, "documents": documents or None}
        final = ""
        before = messages
        if check_bool("continue_final_message", continued):
            final = text_to_continue(messages)
            before = messages[:-1]
            given["add_generation_prompt"] = True
        prompt = self._render(before, given, describe)
        think, thinking = self.format.think, self._thinks(prompt)
        if not final:
            return _Rendered(prompt, thinking)
        if thinking and think is not None:
            prompt = prompt.rstrip().removesuffix(think[0])
        if think is not None and final.lstrip().startswith(think[0]):
            return _Rendered(prompt, think[1] not in final, final, final)
        # The template may begin replies with more than the generation prompt, such as a space, an
        # empty reasoning or a channel, but it may also render earlier messages differently.
        given["add_generation_prompt"] = False
        replied = self._render([*before, {**messages[-1], **_REPLY}], given, describe)
        spans = _reply_spans(replied)
        text = replied[: spans[0][0]] if spans else replied
        if not spans or not text.startswith(prompt.rstrip()):
            return _Rendered(prompt, False, final, final)
        return _Rendered(text, False, final, str.__str__(text[len(prompt) :]) + final)

    def _thinks(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning."""
        think = self.format.think
        return think is not None and prompt.rstrip().endswith(think[0])

    def _render(
        self, messages: Sequence[Message], given: Mapping[str, Any], describe: bool = False
    ) -> str:
        """Render a conversation.

        given: the template's variables; describe: whether tools are described in messages.
        """
        tokenizer = self._tokenizer
        messages = [{**message, ORIGIN: MESSAGE + i} for i, message in enumerate(messages)]
        tools = given.get("tools") or ()
        if describe and (tools or "tool" not in self.source):
            messages = with_described_tools(messages, tools)
            given = {**given, "tools": None}
        messages = for_template(messages, self.source)
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **given,
            "messages": messages,
        }
        own = {
            "bos_token": tokenizer.token_text(tokenizer.bos),
            "eos_token": tokenizer.token_text(tokenizer.eos),
        }
        variables = _plain(variables)
        rendered: list[dict[str, Any]] = variables["messages"]
        origins = [one.pop(ORIGIN, None) for one in rendered]
        for i, one in enumerate(rendered):
            if isinstance(one.get("content"), MarkedText):
                origins[i] = REPLY
        return self._template.render(variables, own=own, origins=origins)

    def _parts(self, rendered: str) -> Iterator[int | str]:
        """A rendered conversation as the template's special tokens and the text between them."""
        special = self._tokenizer.special_texts
        escape = SpecialTokenEscape(special, unused_characters([rendered, *special]))
        pieces, end = [], 0
        for origin, length in runs(rendered):
            begin, end = end, end + length
            text = rendered[begin:end]
            if origin != TEMPLATE:
                text = escape.escape_name(text) if origin == NAME else escape.escape(text)
            pieces.append(text)
        for part in self._tokenizer.split_special("".join(pieces)):
            yield escape.unescape(part) if isinstance(part, str) else part

    def _final_parts(self, text: str) -> Iterator[int | str]:
        """The text of a message to continue, as markers and the text between them."""
        tokens: dict[str, int] = {}
        if self.format.name != "harmony":  # its markers end the message
            tokens = self._marker_tokens()
        markers = "|".join(map(re.escape, tokens)) or "(?!)"
        for part in re.split(f"({markers})", text):
            yield tokens.get(part, part)


def _places(wanted: Sequence[int], tokens: Sequence[int]) -> Iterator[int]:
    """Where each occurrence of `wanted` ends."""
    n = len(wanted)
    if not n:
        return
    i = -1
    with suppress(ValueError):  # of index() at the end
        while True:
            i = tokens.index(wanted[0], i + 1)
            if tokens[i : i + n] == wanted:
                yield i + n


def _joined(parts: Iterable[int | str]) -> Iterator[int | str]:
    """Parts with adjacent texts joined, because they are tokenized together."""
    for kind, group in groupby(parts, type):
        if kind is str:
            yield "".join(map(str, group))
        else:
            yield from group


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


def _plain(value: Any) -> Any:
    """`value` with mappings and sequences as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _reply_spans(rendered: str) -> list[tuple[int, int]]:
    """Where the text of _REPLY begins and ends."""
    spans, end = [], 0
    for origin, length in runs(rendered):
        begin, end = end, end + length
        if origin == REPLY:
            spans.append((begin, end))
    return spans
