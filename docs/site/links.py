"""Links out of docs/: a page of the site for each file that they lead to.

Pages link to sources as a reader of the repository expects, `../cpp/kv/policy.h`. The site has no
such file, so it gets a page that shows it, and the link is made to lead there.
"""

from __future__ import annotations

import os.path
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# [text](target#heading), of an image too; not what is in code.
_CODE = r"(?P<code>^```.*?^```|`[^`\n]+`)"
_LINK = re.compile(
    rf"{_CODE}|(?P<open>\]\()(?P<target>[^)\s]+)(?P<close>\))", re.MULTILINE | re.DOTALL
)
_LANGUAGES = {
    ".c": "c", ".cpp": "cpp", ".cu": "cpp", ".cuh": "cpp", ".h": "cpp", ".hpp": "cpp",
    ".py": "python", ".toml": "toml", ".txt": "cmake", ".yml": "yaml",
}  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file that a page links to, and for the files that those link to."""
    root = _root(config)
    pages = [file for file in files.documentation_pages() if file.abs_src_path is not None]
    to_read = [Path(str(file.abs_src_path)) for file in pages]
    while to_read:
        path = to_read.pop()
        for target in _targets(path, root):
            place = _place(target, config)
            if target.exists() and not files.get_file_from_path(place):
                if target.suffix in (".png", ".svg"):
                    raise ValueError(f"{path}: shows {target}, a picture outside docs/")
                files.append(File.generated(config, place, content=_content(target, config)))
                if target.suffix == ".md":
                    to_read.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the links lead to the pages."""
    uri = page.file.src_uri
    if page.file.generated_by is not None:
        return markdown  # _content has done it
    return _rewrite(markdown, Path(config.docs_dir) / uri, uri, config)


def _root(config: MkDocsConfig) -> Path:
    return Path(config.docs_dir).parent


def _rewrite(markdown: str, path: Path, uri: str, config: MkDocsConfig) -> str:
    def lead(target: str) -> str:
        file, hash_, heading = target.partition("#")
        found = _resolve(path, file)
        if not file or ":" in file or not found.exists():
            return target  # mkdocs says what is wrong with it
        place = _place(found, config)
        return posixpath.relpath(place, posixpath.dirname(uri) or ".") + hash_ + heading

    return _replace_targets(markdown, lead)


def _replace_targets(markdown: str, lead: Callable[[str], str]) -> str:
    def replace(match: re.Match[str]) -> str:
        if match["code"] is not None:
            return match[0]
        return match["open"] + lead(match["target"]) + match["close"]

    return _LINK.sub(replace, markdown)


def _targets(path: Path, root: Path) -> list[Path]:
    """Files outside docs/ that a page links to."""
    found = []
    for match in _LINK.finditer(path.read_text(encoding="utf-8")):
        file = (match["target"] or "").partition("#")[0]
        if file and ":" not in file:
            target = _resolve(path, file)
            if target.is_relative_to(root) and not target.is_relative_to(root / "docs"):
                found.append(target)
    return found


def _resolve(path: Path, target: str) -> Path:
    found = Path(os.path.normpath(path.parent / target))
    readme = found / "README.md"
    return readme if readme.exists() else found


def _place(target: Path, config: MkDocsConfig) -> str:
    """The path in docs/ of the page for a file of the repository."""
    if target.is_relative_to(config.docs_dir):
        return target.relative_to(config.docs_dir).as_posix()
    place = target.relative_to(_root(config)).as_posix()
    return f"source/{place}" if target.suffix == ".md" else f"source/{place}.md"


def _content(target: Path, config: MkDocsConfig) -> str:
    name = target.relative_to(_root(config)).as_posix()
    head = f"---\ntitle: {name}\nsearch:\n  exclude: true\nhide:\n  - navigation\n---\n\n"
    if target.is_dir():
        entries = sorted(path.name for path in target.iterdir() if path.name[0] not in "._")
        return f"{head}# `{name}/`\n\n" + "".join(f"- `{entry}`\n" for entry in entries)
    text = target.read_text(encoding="utf-8")
    if target.suffix == ".md":  # a page as others: in the search, beside the navigation
        return _rewrite(text, target, _place(target, config), config)
    language = _LANGUAGES.get(target.suffix, "text")
    return f"{head}# `{name}`\n\n````{language}\n{text}\n````\n"
