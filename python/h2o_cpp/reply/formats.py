"""The formats of replies by name, and which one a chat template's model has been taught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Final

from h2o_cpp.reply import harmony, hermes, llama3, mistral, qwen_coder
from h2o_cpp.reply.calls import Tools
from h2o_cpp.reply.rules import Rules
from h2o_cpp.reply.scanner import Scanner, Steps


@dataclass(frozen=True)
class ReplyFormat:
    """How a model writes its reply.

    Attributes: `name`; `markers`, which must be spelled in the text though they may be special
    tokens; `think`, what comes before and after reasoning, or None; `parse` and `grammar`, the
    parser and the grammar of calls, or None: no tools.
    """

    name: str
    markers: tuple[str, ...] = ()
    think: tuple[str, str] | None = None
    parse: Callable[[Scanner, Tools], Steps[None]] | None = None
    grammar: Callable[[Rules], str] | None = None


def _format(name: str, module: ModuleType) -> ReplyFormat:
    return ReplyFormat(name, module.MARKERS, None, module.parse, module.grammar)


FORMATS: Final = {
    name: _format(name, module)
    for name, module in {
        "hermes": hermes,
        "qwen3-coder": qwen_coder,
        "llama3": llama3,
        "mistral": mistral,
        "harmony": harmony,
    }.items()
}

_PLAIN = ReplyFormat("plain")

# What a template has that teaches the format, in the order in which it is looked for.
_SIGNS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3-coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|start_header_id|>", "tools")),
)
_THINK = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def format_named(name: str, template: str = "") -> ReplyFormat:
    """The format of this name, for a model with this chat template. Raises ValueError."""
    if name not in FORMATS:
        raise ValueError(f"there is no format {name!r} of tool calls, only {', '.join(FORMATS)}")
    return _with_thinking(FORMATS[name], template)


def format_of(template: str) -> ReplyFormat:
    """The format that a template's model writes; without tools where the template shows none."""
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return _with_thinking(FORMATS[name], template)
    return _with_thinking(_PLAIN, template)


def _with_thinking(known: ReplyFormat, template: str) -> ReplyFormat:
    for think in _THINK:
        if think[1] in template:
            return replace(known, think=think, markers=(*known.markers, *think))
    return known
