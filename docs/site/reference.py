"""Adds the pages of docs/site/reference to the site, filled from the code that they are about.

A page says where with a comment, `<!-- filled: NAME -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from commands import command_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]


def header_reference() -> str:
    """The C header, whose comments are its documentation."""
    return f"```c\n{(ROOT / 'cpp' / 'capi' / 'h2o.h').read_text(encoding='utf-8')}```"


def server_reference() -> str:
    """The server's own page of endpoints, as its OpenAPI document has them."""
    from h2o_cpp import BUNDLED_MODEL, Generator
    from h2o_cpp.serve.app import create_app
    from h2o_cpp.serve.docs_page import docs_page

    with Generator(BUNDLED_MODEL, threads=1) as generator:
        page = docs_page(create_app(generator, name="model").openapi())
    return page.partition('<main class="docs">\n')[2].partition("</main>")[0]


_FILLS: Mapping[str, Callable[[], str]] = {
    "c": header_reference,
    "cli": command_reference,
    "server": server_reference,
}
_HERE = re.compile(r"<!-- filled: (\w+) -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for page in sorted((ROOT / "docs" / "site" / "reference").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        content = _HERE.sub(lambda match: _FILLS[match[1]](), text)
        files.append(File.generated(config, f"reference/{page.name}", content=content))
    return files
