"""Docstrings as Markdown: what is listed as `name: meaning` becomes a list."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

# A name or several, perhaps with a default or a value in quotes, then its meaning.
_NAME = r'"?[\w.+]+"?(?:=[\w."-]+)?'
_ITEM = re.compile(rf"^({_NAME}(?:(?:, | / ){_NAME})*): (?=\S)")


class Lists(Extension):
    """Rewrites the docstrings of a package."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """The comment behind a field is its docstring."""
        _, comment, said = attr.source.partition("  # ")
        if attr.docstring is None and comment and "\n" not in said.strip():
            attr.docstring = Docstring(as_markdown(said), parent=attr)

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """The docstring of a module, a class, a function or an attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """A docstring in the style of this project; lines below a name that are indented are its."""
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n\s*\n", docstring.strip()))


def _paragraph(text: str) -> str:
    text = escape(text, quote=False).replace("][", "]\\[")  # neither HTML nor a link
    lines = text.split("\n")
    if not _ITEM.match(lines[0]) or text.startswith("Raises"):
        return text
    return "\n".join(_ITEM.sub(r"- `\1`: ", line) for line in lines)
