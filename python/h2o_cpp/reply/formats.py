"""The formats of replies by name, and which of them a chat template uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Final

from h2o_cpp.reply import gemma4, glm, harmony, hermes, llama3, mistral, qwen_coder
from h2o_cpp.reply.calls import Tools
from h2o_cpp.reply.rules import Rules
from h2o_cpp.reply.scanner import Scanner, Steps


@dataclass(frozen=True)
class ReplyFormat:
    """The format of a model's replies.

    Attributes: `name`; `markers`, texts that must be visible though they may be special tokens;
    `think`, the markers around reasoning, or None; `parse` and `grammar`, the parser and the
    grammar of tool calls, or None without tools; `before_form`, the grammar of what precedes
    content of a given form; `signs`, the parts of a chat template that identify the format.
    """

    name: str
    markers: tuple[str, ...] = ()
    think: tuple[str, str] | None = None
    parse: Callable[[Scanner, Tools], Steps[None]] | None = None
    grammar: Callable[[Rules], str] | None = None
    before_form: Callable[[Rules], str] | None = None
    signs: tuple[str, ...] = ()

    @property
    def trigger(self) -> str | None:
        """The marker that begins every call and nothing else; None: there is none."""
        first = self.signs[0] if self.signs else None
        return first if first in self.markers and self.name != "harmony" else None


def _format(name: str, module: ModuleType, *signs: str) -> ReplyFormat:
    before_form = getattr(module, "before_form", None)
    return ReplyFormat(name, module.MARKERS, None, module.parse, module.grammar, before_form, signs)


# In the order in which a template is searched for their signs.
FORMATS: Final = {
    known.name: known
    for known in (
        _format("harmony", harmony, "<|channel|>", "<|message|>"),
        _format("gemma4", gemma4, "<|tool_call>", '<|"|>'),
        _format("mistral", mistral, "[TOOL_CALLS]"),
        _format("qwen3-coder", qwen_coder, "<tool_call>", "<function=", "<parameter="),
        _format("glm", glm, "<tool_call>", "<arg_key>", "<arg_value>"),
        _format("hermes", hermes, "<tool_call>"),
        _format("llama3", llama3, "<|start_header_id|>", "tools"),
    )
}

# For templates without tools or with an unknown format: the prompt describes the tools.
GENERIC: Final = replace(FORMATS["hermes"], name="generic")
FORMATS[GENERIC.name] = GENERIC

_THINK = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def format_named(name: str, template: str = "") -> ReplyFormat:
    """The format of this name, for a chat template. Raises ValueError."""
    if name not in FORMATS:
        raise ValueError(f"tool_parser={name!r}, expected one of {', '.join(FORMATS)}")
    return _with_thinking(FORMATS[name], template)


def format_of(template: str) -> ReplyFormat:
    """The format of a chat template; GENERIC if it is unknown."""
    found = (known for known in FORMATS.values() if all(sign in template for sign in known.signs))
    return _with_thinking(next(found, GENERIC), template)


def _with_thinking(known: ReplyFormat, template: str) -> ReplyFormat:
    for think in _THINK:
        if think[1] in template:
            return replace(known, think=think, markers=(*known.markers, *think))
    return known
