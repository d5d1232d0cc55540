"""Fills the pages in docs/reference from the code that they are about.

A page says where with a comment, `<!-- filled: NAME -->`; in the repository, where nothing fills
it, it says what it would be filled with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from c_header import header_reference
from commands import command_reference
from endpoints import server_reference
from mkdocs.config.defaults import MkDocsConfig

_FILLS: Mapping[str, Callable[[Path], str]] = {
    "c": lambda root: header_reference(
        (root / "cpp" / "capi" / "h2o.h").read_text(encoding="utf-8")
    ),
    "cli": lambda _: command_reference(),
    "server": lambda _: server_reference(),
}
_HERE = re.compile(r"<!-- filled: (\w+) -->.*?<!-- end -->", re.DOTALL)


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: object) -> str:
    """Fill what there is to fill."""
    root = Path(config.docs_dir).parent
    return _HERE.sub(lambda match: _FILLS[match[1]](root), markdown)
