"""The pages of the documentation and the code in them."""

from __future__ import annotations

import ast
import asyncio
import inspect
import itertools
import re
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (".", "docs", "docs/measured", "examples", "models")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
FENCE = re.compile(r"^( *)(```+)(\w*)\n(.*?)^\1\2$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str = "python") -> list[str]:
    """The code blocks of a page in a language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [textwrap.dedent(match[4]) for match in FENCE.finditer(text) if match[3] == language]


def run(
    page: str, names: dict[str, object], other: Mapping[str, str] | None = None
) -> dict[str, object]:
    """The names after the Python blocks of a page, run in order. other: words to replace."""
    for block in blocks(page):
        for word, replacement in (other or {}).items():
            block = block.replace(word, replacement)
        code = compile(block, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        done = eval(code, names)
        if inspect.iscoroutine(done):
            asyncio.run(done)
    return names


def documented_commands(page: Path) -> list[list[str]]:
    """The arguments of each h2o-cpp in a page's sh blocks, without the shell's variables."""
    found = []
    for block in blocks(str(page), "sh"):
        for line in block.replace("\\\n", "").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = ["0.2" if word.startswith("$(") else word for word in lexer]
            for separates, command in itertools.groupby(
                words, {"|", "&&", ";", "<", ">"}.__contains__
            ):
                name, *arguments = command
                if not separates and Path(name).name == "h2o-cpp":
                    found.append([word for word in arguments if not word.startswith("$")])
    return found
