"""Grammars of replies that must call a tool, or whose content has an output format."""

from __future__ import annotations

from h2o_cpp.reply.formats import ReplyFormat
from h2o_cpp.reply.rules import Rules


def call_grammar(format: ReplyFormat, rules: Rules, *, thinking: bool = False) -> str:
    """A grammar of replies that are optional reasoning followed by calls of the rules' tools.

    thinking: the reply begins inside reasoning.

    Raises ValueError for tools that cannot be called.
    """
    if format.grammar is None:
        raise ValueError(f"tool calls are not supported in the format {format.name}")
    if not rules.tools:
        raise ValueError("there is no tool to call")
    calls = format.grammar(rules)
    if format.think is None:
        return rules.grammar(calls)
    begin, end = format.think
    thought = _thought(rules, end)
    if not thinking:
        thought = f"({rules.marker(begin)} {thought})?"
    return rules.grammar(f"{thought} {calls}")


def form_grammar(format: ReplyFormat, rules: Rules, *, thinking: bool = False) -> str | None:
    """A grammar of replies that are content, which is @form, or calls of the rules' tools;
    reasoning and headers may come first. None: only content.

    thinking, errors: as for call_grammar.
    """
    reply = "@form"
    if format.before_form is not None:
        reply = f"{format.before_form(rules)} @form"
    if rules.tools and format.grammar is not None:
        reply = f"({reply} | {format.grammar(rules)})"
    if thinking and format.think is not None:
        reply = f"{_thought(rules, format.think[1])} {reply}"
    return None if reply == "@form" else rules.grammar(reply)


def _thought(rules: Rules, end: str) -> str:
    lines = rules.terminal(r"/\n{1,2}/")
    return f"{rules.up_to(end)} {lines}?"
