"""The documentation: links resolve, code runs, outputs are as shown, and the site builds."""

from __future__ import annotations

import ast
import asyncio
import inspect
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from h2o_cpp import BUNDLED_MODEL, Chat, Completion, Generator
from h2o_cpp.cli import _GROUPS, main, make_parser
from support.needs import packages
from support.scripted_chat import scripted_chat
from support.scripted_opt import END

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"
FOLDERS = (".", "docs", "docs/measured", "examples", "models")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
FENCE = re.compile(r"^( *)(```+)(\w*)\n(.*?)^\1\2$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|\b(?:src|srcset)=\"([^\"]+)\"")


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


def blocks(page: str, language: str = "python") -> list[str]:
    """The code blocks of a page in a language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [textwrap.dedent(match[4]) for match in FENCE.finditer(text) if match[3] == language]


def run(page: str, names: dict[str, object]) -> dict[str, object]:
    """The names after the Python blocks of a page, run in order."""
    for block in blocks(page):
        code = compile(block, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        done = eval(code, names)
        if inspect.iscoroutine(done):
            asyncio.run(done)
    return names


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the bundled model under the names that pages use."""
    monkeypatch.chdir(tmp_path)
    for name in ("model.gguf", "large.gguf", "tiny-opt.gguf"):
        shutil.copyfile(BUNDLED_MODEL, name)
    return tmp_path


@pytest.mark.usefixtures("in_folder")
def test_quick_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(blocks("docs/quickstart.md")) == 3
    run("docs/quickstart.md", {})
    out = capsys.readouterr().out
    assert re.search(r"^\d+ tokens read, 409 kept$", out, re.MULTILINE)
    assert "100 tokens seen;" in out


def test_front_page(capsys: pytest.CaptureFixture[str]) -> None:
    run("docs/index.md", {})
    assert len(capsys.readouterr().out) > 100


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python blocks run with a model that has a chat template."""
    monkeypatch.chdir(tmp_path)
    for name in ("model.gguf", "small.gguf"):
        scripted_chat([END] * 128).write(Path(name))
    names = run("README.md", {})
    assert isinstance(names["chat"], Chat)
    assert len(names["outputs"]) == 2  # type: ignore[arg-type]


@pytest.mark.usefixtures("in_folder")
def test_batching_page(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("docs/batching.md", {"prompts": ["The old man", "It was"]})
    pieces = capsys.readouterr().out
    assert set(re.findall(r"^[01] ", pieces, re.MULTILINE)) == {"0 ", "1 "}
    assert isinstance(names["completion"], Completion)
    assert names["completion"].result().completion_tokens > 0


@pytest.mark.usefixtures("in_folder")
def test_snapshots_of_the_cache_page() -> None:
    names: dict[str, object] = {"generator": Generator("model.gguf", hh=0.2)}
    run("docs/cache.md", names | {"prompt": "The old", "question": "Who?", "system_prompt": "Be."})


@packages("llguidance", "pydantic")
@pytest.mark.usefixtures("in_folder")
def test_grammar_page() -> None:
    run("docs/grammar.md", {"generator": Generator("model.gguf")})


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_valid_options(page: Path) -> None:
    for words in documented_commands(page):
        assert make_parser(words[0]).parse_args(words).command == words[0]


def expected_output(page: str) -> tuple[list[str], re.Pattern[str]]:
    """The command of a page that begins with $, and its output, in which ... is any text."""
    (block,) = blocks(page, "")
    command, output = re.fullmatch(r"\$ h2o-cpp (.*?[^\\])\n(.*)", block, re.DOTALL).groups()  # type: ignore[union-attr]
    pattern = re.escape(output.strip()).replace(re.escape("..."), ".*")
    return shlex.split(command.replace("\\\n", "")), re.compile(pattern, re.DOTALL)


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize("page", ["docs/inspect.md", "docs/batching.md"])
def test_printed_output(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of a command is as its page shows it."""
    arguments, output = expected_output(page)
    assert main(arguments) == 0
    assert output.fullmatch(capsys.readouterr().out.strip())


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
