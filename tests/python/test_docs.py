"""The documentation: links resolve, records show their results, and the site builds."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from h2o_bench.tables import TABLE, redraw
from h2o_cpp.cli import _GROUPS, make_parser
from support.needs import packages
from support.pages import FENCE, PAGES, ROOT, documented_commands

SITE = ROOT / "docs" / "site"
LINK = re.compile(r"\]\(([^)\s]+)\)|\b(?:src|srcset)=\"([^\"]+)\"")


def prose(page: Path) -> str:
    """The text of a page without code."""
    return re.sub(r"`[^`\n]+`", "``", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as on GitHub and on the site."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def broken_links(page: Path) -> list[str]:
    """Broken links of a page, each with the reason."""
    found = []
    for link in (target or source for target, source in LINK.findall(prose(page))):
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
        "```\n[d](none.md)\n```\n![e](none.png) [f](other.md#no-heading) [g](#here) [h](../..)\n"
        '<source srcset="none.svg"><img src="other.md">\n',
        encoding="utf-8",
    )
    assert [fault.partition(":")[0] for fault in broken_links(page)] == [
        "none.png",
        "other.md#no-heading",
        "#here",
        "../..",
        "none.svg",
    ]


RECORDS = sorted((ROOT / "docs" / "measured").glob("*.md"))


@pytest.mark.parametrize("page", RECORDS, ids=lambda page: page.name)
def test_records_show_their_results(page: Path) -> None:
    """Each table is that of the results beside the page (`tools/bench records` draws it)."""
    text = page.read_text(encoding="utf-8")
    assert text == redraw(page)
    assert not re.search(r"^\|", TABLE.sub("", text), re.MULTILINE)


def section(page: Path, name: str) -> str:
    """The text after the heading with this anchor; the whole page without one."""
    text = page.read_text(encoding="utf-8")
    headings = [*re.finditer(r"^#+ (.+)$", text, re.MULTILINE), None]
    for heading, following in itertools.pairwise(headings):
        if heading is not None and anchor(heading[1]) == name:
            return text[heading.end() : following and following.start()]
    return text


def test_claims_of_the_readme_lead_to_results() -> None:
    """Each row of the table "Measured" has a link to a table of results."""
    claims = section(ROOT / "README.md", "measured").split("|---|---|")[1].strip().splitlines()
    assert len(claims) == 3
    for claim in claims:
        links = [link for link, _ in LINK.findall(claim) if link.startswith("docs/measured/")]
        assert links
        for page, _, heading in (link.partition("#") for link in links):
            assert TABLE.search(section(ROOT / page, heading)), (page, heading)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_valid_options(page: Path) -> None:
    for words in documented_commands(page):
        assert make_parser(words[0]).parse_args(words).command == words[0]


def test_every_page_is_in_the_contents() -> None:
    contents = set(
        re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    )
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    generated = {page for page in contents if page.startswith("reference/")}
    assert {page.removeprefix("site/") for page in pages} == contents - {"source/CONTRIBUTING.md"}
    assert {page for page in pages if page.startswith("site/")} == {f"site/{p}" for p in generated}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the generators of reference pages importable."""
    monkeypatch.syspath_prepend(str(SITE))


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
@packages("fastapi", "mkdocs")
def test_c_and_server_reference() -> None:
    """They have the whole header, and the endpoints with the fields of their requests."""
    from reference import header_reference, server_reference  # type: ignore[import-not-found]

    assert (ROOT / "cpp" / "capi" / "h2o.h").read_text(encoding="utf-8") in header_reference()
    page = server_reference()
    for path in ("POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models"):
        assert f"<code>{path}</code>" in page
    assert "<code>kept_every</code>" in page


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
