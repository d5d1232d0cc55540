"""The C header as a page: its comments as text, its declarations as they are."""

from __future__ import annotations

import re
import textwrap
from html import escape

_SECTION = re.compile(r"/\* -+ (.+?) -+ \*/")
_COMMENT = re.compile(r"/\*(.*?)\*/\n?", re.DOTALL)
# What begins a block and is said of it as a whole; `struct {} name;` has its name at the end.
_NAME = re.compile(
    r"^(?:H2O_API\s.*?\b(?P<function>h2o_\w+)\(|\} (?P<type>h2o_\w+);"
    r"|typedef\s[^{]*?(?:\(\*)?(?P<alias>h2o_\w+)\)?(?:;|\()|\s+(?P<value>H2O_[A-Z_]+)(?: =|,))",
    re.MULTILINE,
)


def header_reference(text: str) -> str:
    """Markdown of a header in the style of h2o.h.

    Blocks are separated by empty lines. A block is a comment and the declarations that it is
    about; the first one is the header's own, and what only the preprocessor reads is left out.
    """
    introduction, _, rest = text.partition("*/\n")
    body = rest.partition("#endif\n\n/* Programs built")[2]
    body = "/* Programs built" + body.partition("#ifdef __cplusplus\n}")[0]
    parts = [_prose(introduction.removeprefix("/*"))]
    parts.append("## Versions, handles, status")
    for block in re.split(r"\n{2,}", body.strip()):
        section = _SECTION.fullmatch(block.strip())
        parts.append(f"## {section[1]}" if section else _block(block))
    return "\n\n".join(parts) + "\n"


def _block(block: str) -> str:
    comment = _COMMENT.match(block)
    code = block[comment.end() :] if comment else block
    if not code.strip():
        return _prose(comment[1]) if comment else ""
    names = [next(filter(None, match.groups())) for match in _NAME.finditer(code)]
    declarations = code.replace(" H2O_NOEXCEPT", "").strip("\n")
    if "H2O_API " in code:  # and lines that go on move with the first
        declarations = re.sub(r"^(H2O_API | {8}(?= ))", "", declarations, flags=re.MULTILINE)
    parts = [f"### {_title(names)}"] if names else []
    if comment:
        parts.append(_prose(comment[1]))
    parts.append(f"```c\n{declarations}\n```")
    return "\n\n".join(parts)


def _title(names: list[str]) -> str:
    """Functions and types; the first value of an enumeration only where there is nothing else."""
    found = dict.fromkeys(name for name in names if name.startswith("h2o_"))
    return ", ".join(f"`{name}`" for name in found) or f"`{names[0]}` …"


def _prose(comment: str) -> str:
    """The paragraphs of a comment; lines that are indented further are code."""
    lines = [re.sub(r"^ \*( |$)", "", line.rstrip()) for line in comment.strip("\n ").split("\n")]
    paragraphs = []
    for paragraph in re.split(r"\n{2,}", "\n".join(lines).strip()):
        if paragraph.startswith("  "):
            paragraphs.append(f"```c\n{textwrap.dedent(paragraph)}\n```")
        else:
            paragraphs.append(_markdown(paragraph))
    return "\n\n".join(paragraphs)


def _markdown(text: str) -> str:
    """Names as code; nothing else of a comment is to be read as Markdown."""
    text = escape(text, quote=False)
    return re.sub(r"(?<![\w`])(\*?\b(?:h2o|H2O)_\w+|NULL|\*\w+|`\w+`)", _code, text)


def _code(match: re.Match[str]) -> str:
    return f"`{match[1].strip('`')}`"
