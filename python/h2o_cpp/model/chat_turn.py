"""ChatTurn: a prompt of a chat template, and the form of the reply that follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from h2o_cpp.arguments import short
from h2o_cpp.reply import Reply, ReplyParser, Rules, call_grammar, form_grammar

if TYPE_CHECKING:
    from h2o_cpp.model.chat_template import ChatTemplate
    from h2o_cpp.model.message_places import Places

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": SCHEMA}}

_TOOLS = "expected {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"


class ChatPrompt(NamedTuple):
    """A tokenized conversation.

    thinking: whether the output begins inside reasoning.
    begun: the beginning of the reply in the prompt, as for ReplyParser.
    replies: where earlier replies begin and end in the tokens, as for Engine.submit.
    messages: the tokens that have a part of each message's text; none: the message is not there.
    """

    tokens: list[int]
    thinking: bool
    begun: str = ""
    replies: Sequence[tuple[int, int]] = ()
    messages: Sequence[Places] = ()


@dataclass(frozen=True)
class ReplyForm:
    """The form of a reply's text.

    spelled: special tokens to include in the text.
    grammar: of the whole text.
    around: as `around_form` of Engine.submit.
    trigger: as for LazyConstraint.
    """

    spelled: Sequence[int] = ()
    grammar: str | None = None
    around: str | None = None
    trigger: tuple[int, Callable[[], str]] | None = None


@dataclass(frozen=True)
class ChatTurn:
    """A conversation up to the assistant's reply.

    Attributes: `prompt`; `tools`, which the reply may call; `n_dropped`, the tokens of turns that
    were left out of the prompt.
    """

    template: ChatTemplate
    prompt: ChatPrompt
    tools: Sequence[Tool] = ()
    n_dropped: int = 0

    @property
    def has_parts(self) -> bool:
        """Whether the reply may have reasoning, channels or calls, which are not content."""
        form = self.template.format
        return bool(self.tools) or form.think is not None or form.before_form is not None

    def form(
        self,
        *,
        must_call: bool = False,
        called_tool: str | None = None,
        has_form: bool = False,
        is_free: bool = True,
        parallel: bool = True,
    ) -> ReplyForm:
        """The form of the reply.

        must_call: the reply is tool calls; called_tool: to this tool.
        has_form: its content has a form, such as a schema, of its own.
        is_free: otherwise, calls that the model begins may follow a grammar.
        parallel: allow several calls.

        Raises ValueError as call_grammar() does.
        """
        spelled = self.template.spelled if self.has_parts else []
        if must_call:
            return ReplyForm(spelled, grammar=self.call_grammar(called_tool, parallel=parallel))
        if has_form:
            return ReplyForm(spelled, around=self.form_grammar(parallel=parallel))
        return ReplyForm(spelled, trigger=self.call_trigger(parallel=parallel) if is_free else None)

    def parser(self) -> ReplyParser:
        """A parser of the reply."""
        return ReplyParser(
            self.template.format,
            tools=tool_schemas(self.tools),
            thinking=self.prompt.thinking,
            begun=self.prompt.begun,
        )

    def parse(self, text: str) -> Reply:
        """Parse a complete reply."""
        parser, reply = self.parser(), Reply()
        reply.add(parser.push(text))
        reply.add(parser.finish())
        return reply

    def call_grammar(self, name: str | None = None, *, parallel: bool = True) -> str:
        """A grammar of replies that are optional reasoning followed by tool calls.

        name: the tool to call; default: any. parallel: allow several calls.

        Raises ValueError for tools that cannot be called, and after the beginning of a reply,
        unless that is reasoning.
        """
        if self._continues_content:
            raise ValueError(
                "a required tool call cannot continue the final message, expected a new reply "
                "(continue_final_message=False)"
            )
        tools, schemas = self.tools, tool_schemas(self.tools)
        if name is not None:
            if name not in schemas:
                known = f"one of {', '.join(schemas)}" if schemas else "tools to choose from"
                raise ValueError(f"tool_choice={name!r}, expected {known}")
            tools = [tool for tool in tools if name in tool_schemas([tool])]
        rules = self._rules(tools, parallel)
        return call_grammar(self.template.format, rules, thinking=self.prompt.thinking)

    def call_trigger(self, *, parallel: bool = True) -> tuple[int, Callable[[], str]] | None:
        """The token that begins a call, and a function that makes the grammar of what follows it.

        None without tools, and if the format has no such token, special or not. Errors of the
        function are those of call_grammar.
        """
        form, tools = self.template.format, self.tools
        if form.trigger is None or not tools:
            return None
        token = self.template.marker_token(form.trigger)
        if token is None:
            return None
        bare = replace(form, think=None)
        return token, lambda: call_grammar(bare, self._rules(tools, parallel, spaces=True))

    def form_grammar(self, *, parallel: bool = True) -> str | None:
        """`around_form` of Engine.submit: replies are content or calls of the tools.

        Raises ValueError for tools that cannot be called.
        """
        if self._continues_content:
            return None
        rules = self._rules(self.tools, parallel)
        return form_grammar(self.template.format, rules, thinking=self.prompt.thinking)

    @property
    def _continues_content(self) -> bool:
        return bool(self.prompt.begun) and not self.prompt.thinking

    def _rules(self, tools: Sequence[Tool], parallel: bool, *, spaces: bool = False) -> Rules:
        return Rules(
            tool_schemas(tools),
            strict=[name for tool in tools if _is_strict(tool) for name in tool_schemas([tool])],
            template=self.template.source,
            token_of=self.template.special_token,
            ends=self.template.end_tokens,
            parallel=parallel,
            spaces=spaces,
        )


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
