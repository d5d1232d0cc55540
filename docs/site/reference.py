"""Fills the pages in docs/reference from the code that they are about.

A page says where with a comment, `<!-- filled: NAME -->`; in the repository, where nothing fills
it, it says what it would be filled with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from commands import command_reference
from mkdocs.config.defaults import MkDocsConfig

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
_HERE = re.compile(r"<!-- filled: (\w+) -->.*?<!-- end -->", re.DOTALL)


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: object) -> str:
    """Fill what there is to fill."""
    return _HERE.sub(lambda match: _FILLS[match[1]](), markdown)
