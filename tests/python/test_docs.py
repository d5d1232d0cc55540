"""The documentation: links resolve, the quick start runs, and the site builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from h2o_cpp.cli import _GROUPS
from support.needs import packages

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"
FOLDERS = (".", "docs", "docs/reference", "examples", "models")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
FENCE = re.compile(r"^( *)(```+)(\w*)\n(.*?)^\1\2$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The text of a page without code."""
    return re.sub(r"`[^`\n]+`", "``", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as on GitHub and on the site."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }


def broken_links(page: Path) -> list[str]:
    """Broken links of a page, each with the reason."""
    found = []
    for link in LINK.findall(prose(page)):
        file, _, heading = link.partition("#")
        if re.match(r"\w+:", file):
            continue
        target = page.parent / file if file else page
        if not target.exists():
            found.append(f"{link}: missing file {file}")
        elif not target.resolve().is_relative_to(ROOT):
            found.append(f"{link}: outside the repository")
        elif heading and heading not in anchors(target):
            found.append(f"{link}: {target.name} has no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    other = tmp_path / "other.md"
    other.write_text("# A `b` & c!\n\n```sh\n# no heading\n```\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#a-b--c) [b](https://example.org/x#y) `[c](none.md)`\n"
        "```\n[d](none.md)\n```\n![e](none.png) [f](other.md#no-heading) [g](#here) [h](../..)\n",
        encoding="utf-8",
    )
    assert [fault.partition(":")[0] for fault in broken_links(page)] == [
        "none.png",
        "other.md#no-heading",
        "#here",
        "../..",
    ]


def test_quick_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs its Python blocks in order."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    blocks = [match[4] for match in FENCE.finditer(page) if match[3] == "python"]
    assert len(blocks) == 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(textwrap.dedent(block), "quickstart.md", "exec"), names)
    out = capsys.readouterr().out
    assert re.search(r"^\d+ tokens read, 409 kept$", out, re.MULTILINE)
    assert "100 tokens seen;" in out


def test_front_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (block,) = (match[4] for match in FENCE.finditer(page) if match[3] == "python")
    exec(compile(block, "index.md", "exec"), {})
    assert len(capsys.readouterr().out) > 100


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the generators of reference pages importable."""
    monkeypatch.syspath_prepend(str(SITE))


@pytest.mark.usefixtures("site")
def test_c_reference() -> None:
    """It has every function, structure and comment of the header."""
    from c_header import header_reference  # type: ignore[import-not-found]

    header = (ROOT / "cpp" / "capi" / "h2o.h").read_text(encoding="utf-8")
    page = header_reference(header)
    functions = re.findall(r"\b(h2o_\w+)\([^;]*?\) H2O_NOEXCEPT;", header)
    assert len(functions) > 25
    for name in functions:
        assert len(re.findall(rf"^[^/\n]*\b{name}\(", page, re.MULTILINE)) >= 1, name
    for name in re.findall(r"^\} (h2o_\w+);", header, re.MULTILINE):
        assert f"### `{name}`" in page
    assert "H2O_NOEXCEPT" not in page
    assert "__cplusplus" not in page
    words = re.findall(r"[A-Za-z]{4,}", " ".join(re.findall(r"/\*.*?\*/", header, re.DOTALL)))
    assert set(words) <= set(re.findall(r"[A-Za-z]{4,}", page))


@pytest.mark.usefixtures("site")
def test_command_reference() -> None:
    """It has every command and its options."""
    from commands import command_reference  # type: ignore[import-not-found]

    page = command_reference()
    for group in _GROUPS.values():
        for name in group:
            assert f"\n## {name}\n" in f"\n{page}"
    assert "| `-n N, --max-tokens N` |" in page or "| `-n, --max-tokens N` |" in page
    assert "%(default)s" not in page


@pytest.mark.usefixtures("site")
@packages("fastapi")
def test_server_reference() -> None:
    """It has the endpoints and the objects they link to."""
    from endpoints import server_reference  # type: ignore[import-not-found]

    page = server_reference()
    for path in ("POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models"):
        assert f"`{path}`" in page
    for linked in re.findall(r"\]\(#(\w+)\)", page):
        assert re.search(rf"^## {linked}$", page, re.MULTILINE | re.IGNORECASE), linked
    assert "| `kept_every` |" in page


@pytest.mark.usefixtures("site")
@packages("griffe")
def test_docstring_parameters_become_lists() -> None:
    from docstrings import as_markdown  # type: ignore[import-not-found]

    assert as_markdown("Do it.\n\nfile: where,\n    or not.\na=1, b: two.\n\nRaises: never.") == (
        "Do it.\n\n- `file`: where,\n    or not.\n- `a=1, b`: two.\n\nRaises: never."
    )


@packages("mkdocs", "material", "mkdocstrings_handlers", "fastapi")
def test_site(tmp_path: Path) -> None:
    """It builds without warnings, and no page loads external resources."""
    out = tmp_path / "site"
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", out],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    pages = list(out.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(\S+)", text)
        assert [url for url in loaded if re.match(r"(\w+:)?//", url)] == [], page
    python = (out / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("Generator", "Chat", "KVCache", "Policy", "Engine", "Snapshot"):
        assert f'id="h2o_cpp.{name}"' in python
