"""Chat templates: from messages to the text and tokens that the model reads."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from h2o_cpp.model.arguments import check_bool, check_str, short
from h2o_cpp.model.builtin_templates import BUILTIN_TEMPLATES
from h2o_cpp.model.jinja_template import JinjaTemplate
from h2o_cpp.model.special_escape import SpecialTokenEscape, unused_characters
from h2o_cpp.model.template_messages import Message, for_template, text_to_continue
from h2o_cpp.model.text_files import read_text
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.reply import (
    ReplyFormat,
    Rules,
    call_grammar,
    form_grammar,
    format_named,
    format_of,
)

_EXPECTED = f"one of {', '.join(BUILTIN_TEMPLATES)}, a file or Jinja2 with {{{{ or {{%"

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": SCHEMA}}

_MESSAGES = "expected a list of messages such as {'role': 'user', 'content': 'Hello'}"
_TOOLS = "expected {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"


def is_jinja(text: str) -> bool:
    """Whether a text is a template rather than a template's name."""
    return "{{" in text or "{%" in text


def read_template(template: str, folder: str | os.PathLike[str] = "") -> str:
    """The text of a template: `template` itself, or that of this name or file.

    folder: where relative files are.

    Raises ValueError, and OSError for a file that cannot be read.
    """
    if is_jinja(check_str("template", template)):
        return template
    if template in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[template]
    file = os.path.join(folder, template)
    text = read_text(Path(file)) if os.path.isfile(file) else ""
    if not is_jinja(text):
        raise ValueError(f"template={short(template)}, expected {_EXPECTED}")
    return text


class ChatPrompt(NamedTuple):
    """A tokenized conversation.

    thinking: whether the output begins inside reasoning.
    begun: the beginning of the reply in the prompt, as for ReplyParser.
    """

    tokens: list[int]
    thinking: bool
    begun: str = ""


class _Rendered(NamedTuple):
    """A conversation in which special tokens are the template's; then `final`, the text of the
    message to continue."""

    text: str
    escaping: SpecialTokenEscape
    thinking: bool
    final: str = ""
    begun: str = ""


class ChatTemplate:
    """A Jinja2 template with the environment of Hugging Face transformers, run in a subprocess.

    Special tokens come only from the template's own text, never from messages and tools. In the
    text of a message that is continued, the markers of reasoning and of tool calls are tokens too,
    as in a reply.

    Attributes: `source`; `format`, the format of reasoning and tool calls; `has_tools`, whether the
    template supports tools.
    """

    def __init__(
        self, source: str | None, tokenizer: Tokenizer, *, tool_parser: str | None = None
    ) -> None:
        """source: as for read_template(); default: the model file's own.

        tool_parser: a name from h2o_cpp.reply.FORMATS; default: from the template.
        """
        own = tokenizer.chat_template
        if source is not None:
            source = read_template(source)
        elif own is None:
            raise ValueError(
                "the model has no chat template (tokenizer.chat_template), expected template= "
                f"(--template) {_EXPECTED}; without one, use stream()"
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
        self.has_tools = "tools" in source

    @property
    def spelled(self) -> list[int]:
        """The special tokens of the format's markers."""
        return [*self._marker_tokens().values()]

    def _marker_tokens(self) -> dict[str, int]:
        tokens = ((marker, self._special_token(marker)) for marker in self.format.markers)
        return {marker: token for marker, token in tokens if token is not None}

    def call_grammar(
        self,
        tools: Sequence[Tool],
        *,
        name: str | None = None,
        parallel: bool = True,
        thinking: bool = False,
        begun: str = "",
    ) -> str:
        """A grammar of replies that are optional reasoning followed by tool calls.

        name: the tool to call; default: any. parallel: allow several calls. thinking, begun: as in
            ChatPrompt.

        Raises ValueError for tools that cannot be called, and after the beginning of a reply,
        unless that is reasoning.
        """
        if begun and not thinking:
            raise ValueError(
                "a required tool call cannot continue the final message, expected a new reply "
                "(continue_final_message=False)"
            )
        schemas = tool_schemas(tools)
        if name is not None:
            if name not in schemas:
                known = f"one of {', '.join(schemas)}" if schemas else "tools to choose from"
                raise ValueError(f"tool_choice={name!r}, expected {known}")
            tools = [tool for tool in tools if name in tool_schemas([tool])]
        return call_grammar(self.format, self._rules(tools, parallel), thinking=thinking)

    def form_grammar(
        self, tools: Sequence[Tool], *, parallel: bool = True, thinking: bool, begun: str = ""
    ) -> str | None:
        """`around_form` of Engine.submit: replies are content or calls of these tools.

        Arguments as for call_grammar. Raises ValueError for tools that cannot be called.
        """
        if begun and not thinking:  # the reply is the rest of the content
            return None
        return form_grammar(self.format, self._rules(tools, parallel), thinking=thinking)

    def _rules(self, tools: Sequence[Tool], parallel: bool) -> Rules:
        return Rules(
            tool_schemas(tools),
            strict=[name for tool in tools if _is_strict(tool) for name in tool_schemas([tool])],
            template=self.source,
            token_of=self._special_token,
            ends=self._tokenizer.end_tokens,
            parallel=parallel,
        )

    def _special_token(self, marker: str) -> int | None:
        parts = self._tokenizer.split_special(marker)
        return parts[0] if len(parts) == 1 and isinstance(parts[0], int) else None

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
        given = self._given(messages, tools, documents, variables, continue_final_message)
        parts = [*self._parts(given.text, given.escaping), *self._final_parts(given.final)]
        tokens = self._tokenizer.encode_chat(_joined(parts), most=most)
        return ChatPrompt(tokens, given.thinking, given.begun)

    def prompt_after_reply(
        self,
        before: Sequence[Message],
        after: Sequence[Message],
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """What follows a reply between `before` and `after`; variables: as for prompt().

        The reply itself is not rendered, so that it stays as the model generated it.
        """
        given = dict(variables or {})
        escaping, mark = self._escaping([before, after, given])
        reply = {"role": "assistant", "content": mark}
        rendered = self._render([*before, reply, *after], escaping, given)
        rest: list[int | str] = []
        found = 0
        for part in self._parts(rendered, escaping):
            if isinstance(part, str) and mark in part:
                found += part.count(mark)
                rest = [part.rpartition(mark)[2]]
            else:
                rest.append(part)
        tokens = self._tokenizer.encode_parts(rest, begins=False)
        if found != 1 or not tokens:
            raise ValueError(
                "the chat template cannot continue a conversation: it must render a reply exactly "
                "once, followed by the next messages"
            )
        return ChatPrompt(tokens, self._thinks(rendered))

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The rendered conversation, in which text from messages may look like special tokens."""
        given = self._given(messages, tools, documents, variables, continue_final_message)
        return given.escaping.unescape(given.text) + given.final

    def _given(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        continued: bool,
    ) -> _Rendered:
        _check_messages(messages)
        given = {**(variables or {}), "tools": tools or None, "documents": documents or None}
        escaping, mark = self._escaping([messages, given])
        final = ""
        before = messages
        if check_bool("continue_final_message", continued):
            final = text_to_continue(messages)
            before = messages[:-1]
            given["add_generation_prompt"] = True
        prompt = self._render(before, escaping, given)
        think, thinking = self.format.think, self._thinks(prompt)
        if not final:
            return _Rendered(prompt, escaping, thinking)
        if thinking and think is not None:
            prompt = prompt.rstrip().removesuffix(think[0])
        if think is not None and final.lstrip().startswith(think[0]):
            return _Rendered(prompt, escaping, think[1] not in final, final, final)
        # The template may begin replies with more than the generation prompt, such as a space, an
        # empty reasoning or a channel, but it may also render earlier messages differently.
        given["add_generation_prompt"] = False
        replied = self._render([*before, {**messages[-1], "content": mark}], escaping, given)
        text, found, _ = replied.partition(mark)
        if not found or not text.startswith(prompt.rstrip()):
            return _Rendered(prompt, escaping, False, final, final)
        header = escaping.unescape(text[len(prompt) :])
        return _Rendered(text, escaping, False, final, header + final)

    def _thinks(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning."""
        think = self.format.think
        return think is not None and prompt.rstrip().endswith(think[0])

    def _escaping(self, used: Any) -> tuple[SpecialTokenEscape, str]:
        """The escaping of special tokens in `used`, and a character that is not in it."""
        unused = unused_characters([self.source, *_texts(used)])
        mark = next(unused)
        # Texts that the template searches for in messages, such as "<think>", must stay unchanged.
        special, kept = self._tokenizer.special_texts, self._template.literals
        return SpecialTokenEscape(special, unused, kept=kept), mark

    def _render(
        self, messages: Sequence[Message], escaping: SpecialTokenEscape, given: Mapping[str, Any]
    ) -> str:
        """Render a conversation so that only the template's own special tokens are recognized."""
        tokenizer = self._tokenizer
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            "bos_token": tokenizer.token_text(tokenizer.bos),
            "eos_token": tokenizer.token_text(tokenizer.eos),
            **_map_texts(given, escaping.escape, escaping.escape_key),
            "messages": _map_texts(
                for_template(messages, self.source), escaping.escape, escaping.escape_key
            ),
        }
        return self._template.render(variables)

    def _parts(self, rendered: str, escaping: SpecialTokenEscape) -> Iterator[int | str]:
        """A rendered conversation as special tokens and the text between them."""
        for part in self._tokenizer.split_special(rendered):
            yield escaping.unescape(part) if isinstance(part, str) else part

    def _final_parts(self, text: str) -> Iterator[int | str]:
        """The text of a message to continue, as markers and the text between them."""
        tokens: dict[str, int] = {}
        if self.format.name != "harmony":  # its markers end the message
            tokens = self._marker_tokens()
        markers = "|".join(map(re.escape, tokens)) or "(?!)"
        for part in re.split(f"({markers})", text):
            yield tokens.get(part, part)


def _joined(parts: Iterable[int | str]) -> Iterator[int | str]:
    """Parts with adjacent texts joined, because they are tokenized together."""
    for kind, group in groupby(parts, type):
        if kind is str:
            yield "".join(map(str, group))
        else:
            yield from group


def tool_schemas(tools: Sequence[Tool] | None) -> dict[str, Any]:
    """Schemas of the tools' arguments by name.

    Raises ValueError for a tool without a name, and TypeError unless it is a list.
    """
    if not isinstance(tools, Sequence | None) or isinstance(tools, str):
        raise TypeError(f"tools={short(tools)} is not a list, {_TOOLS}")
    schemas: dict[str, Any] = {}
    for i, tool in enumerate(tools or ()):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"tools[{i}]={short(tool)} has no name, {_TOOLS}")
        schemas[name] = function.get("parameters")
    return schemas


def _is_strict(tool: Tool) -> bool:
    return tool.get("function", tool).get("strict") is True


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


def _map_texts(value: Any, change: Callable[[str], str], change_key: Callable[[str], str]) -> Any:
    """`value` with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change_key(key) if isinstance(key, str) else key: _map_texts(item, change, change_key)
            for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [_map_texts(item, change, change_key) for item in value]
    return value


def _texts(value: Any) -> list[str]:
    """Every string in `value`."""
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    _map_texts(value, collect, collect)
    return texts
