"""The page at / in a headless Chromium: keyboard, phone width, and Generator's text.

H2O_SCREENSHOTS=DIR stores screenshots there.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from support.background import PATIENCE
from support.needs import needs
from support.scripted_chat import PLAIN

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect, sync_playwright

from h2o_cpp.serve.catalog import Catalog, Entry
from h2o_cpp.serve.service import Service
from support.serving import Server, serving, serving_catalog, wait_until
from support.tool_talk import THINKS, WEATHER, talking

expect.set_options(timeout=PATIENCE * 1000)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
pytestmark = needs("other programs", CHROMIUM is not None)
PROMPT = "It was a bright morning, and the old man went down to the sea with"
CACHE: dict[str, Any] = {"hh": 40, "n_ctx": 512, "threads": 1}
DESKTOP, PHONE = {"width": 1200, "height": 800}, {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tiny_opt: Path) -> Iterator[Server]:
    with (
        Generator(tiny_opt, max_sequences=2, **CACHE) as generator,
        serving(generator, template=PLAIN) as server,
    ):
        yield server


@pytest.fixture(params=[DESKTOP, PHONE], ids=["desktop", "phone"])
def page(request: pytest.FixtureRequest, browser: Any, server: Server) -> Iterator[Any]:
    """The page, which must not make the browser complain."""
    yield from opened(browser, server, request.param)


def opened(browser: Any, server: Server, viewport: Any = DESKTOP) -> Iterator[Any]:
    complaints: list[str] = []
    page = browser.new_page(viewport=viewport)
    page.on("console", lambda one: complaints.append(one.text) if one.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(server.url)
    expect(page.locator("#about")).to_contain_text("tiny")
    yield page
    page.close()
    assert [one for one in complaints if "status of 4" not in one] == []


def end(page: Any) -> None:
    """Wait until the answer is there."""
    expect(page.get_by_role("button", name="Stop")).to_be_disabled(timeout=30_000)


def go_on(page: Any, prompt: str, n: int) -> None:
    """Continue a text greedily, with the keyboard alone."""
    page.locator("#mode").select_option("continue")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill(str(n))
    page.get_by_label("Text to go on from").fill(prompt)
    page.keyboard.press("Enter")
    end(page)


def keep_picture(page: Any, name: str) -> None:
    if folder := os.environ.get("H2O_SCREENSHOTS"):
        page.get_by_role("button", name="New text").click()
        page.get_by_label("Temperature").fill("0.8")
        page.get_by_label("Text to go on from").fill(PROMPT)
        page.keyboard.press("Enter")
        end(page)
        page.screenshot(path=Path(folder) / name, full_page=True)


def test_a_text_and_its_cache(page: Any, tiny_opt: Path) -> None:
    go_on(page, PROMPT, 120)
    with Generator(tiny_opt, **CACHE) as alone:
        stream = alone.stream(PROMPT, max_tokens=120, temperature=0)
        expected = PROMPT + "".join(stream)
        stats = alone.stats()
        heads = [(i, j) for i in range(stats.n_layers) for j in range(stats.n_kv_heads)]
        kept = {int(p) for head in heads for p in alone.kept(*head)[0]}
    assert page.locator("#log").text_content() == expected
    tokens = page.locator("#tokens span")
    assert tokens.count() == stats.tokens_seen
    classes = [(tokens.nth(i).get_attribute("class") or "").split() for i in range(tokens.count())]
    shown = {i for i, names in enumerate(classes) if "evicted" not in names}
    assert shown == kept
    assert {i for i, names in enumerate(classes) if "recent" in names} == {
        *range(stats.tokens_seen - 20, stats.tokens_seen)
    }
    expect(page.locator("#kept")).to_have_text(f"40 of {stats.tokens_seen}")
    expect(page.locator("#evicted")).to_have_text(str(stats.tokens_seen - 40))
    full = stats.full_cache_bytes / 2**20
    expect(page.locator("#memory")).to_have_text(
        f"{stats.cache_bytes / 2**10:.0f} KiB of {full:.1f} MiB"
    )
    assert re.fullmatch(r"[\d.]+ tokens/s", page.locator("#speed").text_content())
    width = page.viewport_size["width"]
    keep_picture(page, "serve.png" if width == DESKTOP["width"] else "serve_phone.png")


def test_keyboard(page: Any) -> None:
    """Every control can be reached, tokens are told one by one, Escape stops."""
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(18):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    order = ["log", "say", "send", "reset", "mode", "budget", "max-tokens", "temperature", "tokens"]
    assert [name for name in reached if name in order][: len(order)] == order
    go_on(page, PROMPT, 30)
    page.locator("#tokens").focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#detail")).to_contain_text('Position 1 · "It" · ')
    page.keyboard.press("End")
    expect(page.locator("#detail")).to_contain_text("recent · kept by 100 % of the heads")
    page.get_by_label("Most tokens").fill("400")
    page.get_by_label("Text to go on from").fill(" and")
    page.keyboard.press("Enter")
    expect(page.locator("#kept")).to_have_text(re.compile("^40 of"), timeout=30_000)
    page.keyboard.press("Escape")
    end(page)


def test_nothing_is_wider_than_the_page(page: Any) -> None:
    go_on(page, "supercalifragilistic" * 12, 40)
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_chat(browser: Any, server: Server, tiny_opt: Path) -> None:
    """Of two turns; then a new one."""
    for page in opened(browser, server):
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Most tokens").fill("25")
        said: list[dict[str, str]] = []
        with Generator(tiny_opt, **CACHE) as alone:
            for message in ("Where is the ship?", "And\nthe captain?"):
                page.get_by_label("Message").fill(message)
                page.get_by_role("button", name="Send").click()
                end(page)
                said.append({"role": "user", "content": message})
                stream = alone.chat(said, template=PLAIN, max_tokens=25, temperature=0)
                said.append({"role": "assistant", "content": "".join(stream)})
        found = page.locator(".message").all_text_contents()
        assert ["".join(one.split()) for one in found] == [
            "".join(one["content"].split()) for one in said
        ]
        page.get_by_role("button", name="New text").click()
        assert page.locator(".message").count() == 0


def test_budget_of_a_text(browser: Any, server: Server) -> None:
    for page in opened(browser, server):
        page.get_by_label("Budget").fill("12")
        go_on(page, PROMPT, 60)
        expect(page.locator("#kept")).to_have_text(re.compile("^12 of"))
        for wrong, message in (("much", "a fraction or a number"), ("300", "slots")):
            page.get_by_label("Budget").fill(wrong)
            page.get_by_label("Text to go on from").fill(" and")
            page.keyboard.press("Enter")
            expect(page.get_by_role("alert")).to_contain_text(message)
            end(page)
            expect(page.get_by_label("Text to go on from")).to_have_value(" and")


def test_two_conversations_at_once(browser: Any, server: Server, tiny_opt: Path) -> None:
    """Both are complete, whichever is shown while they run, and after a reload."""
    with Generator(tiny_opt, **CACHE) as alone:
        expected = PROMPT + alone.generate(PROMPT, max_tokens=450, temperature=0).text
    for page in opened(browser, server):
        page.locator("#mode").select_option("continue")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Most tokens").fill("450")
        page.get_by_label("Text to go on from").fill(PROMPT)
        page.keyboard.press("Enter")
        expect(page.locator("#kept")).to_have_text(re.compile("of"))
        page.get_by_role("button", name="New text").click()
        assert page.locator("#log").text_content() == ""
        go_on(page, "The king", 5)
        names = page.locator("#conversations button:not(.remove)")
        expect(names).to_have_count(2)
        names.filter(has_text="bright morning").click()
        end(page)
        assert page.locator("#log").text_content() == expected
        expect(page.locator("#kept")).to_have_text(re.compile("^40 of"))
        page.reload()
        names.filter(has_text="bright morning").click()
        assert page.locator("#log").text_content() == expected
        page.get_by_role("button", name="Remove It was a bright").click()
        expect(names).to_have_count(1)
        expect(names).to_contain_text("The king")


def test_running_conversation_shows_its_output_when_opened_again(
    browser: Any, server: Server, tiny_opt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine pauses until the conversation has been left and opened again."""
    begun, resume = threading.Event(), threading.Event()

    tokens = itertools.count()

    def pause_at_tenth(_: Any, mask: Any) -> None:
        mask[:] = 0xFFFFFFFF  # all tokens are allowed
        if next(tokens) == 10:
            begun.set()
            assert resume.wait(PATIENCE), "stuck"

    submit = partial(server.engine.submit, constraint=pause_at_tenth)
    with Generator(tiny_opt, **CACHE) as alone:
        expected = PROMPT + alone.generate(PROMPT, max_tokens=20, temperature=0).text
    for page in opened(browser, server):
        with monkeypatch.context() as patch:
            patch.setattr(server.engine, "submit", submit)
            page.locator("#mode").select_option("continue")
            page.get_by_label("Temperature").fill("0")
            page.get_by_label("Most tokens").fill("20")
            page.get_by_label("Text to go on from").fill(PROMPT)
            page.keyboard.press("Enter")
            assert begun.wait(PATIENCE), "stuck"
            page.get_by_role("button", name="New text").click()
            page.locator("#conversations button").filter(has_text="It was a bright").first.click()
            expect(page.get_by_role("button", name="Stop")).to_be_enabled()
            resume.set()
        end(page)
        assert page.locator("#log").text_content() == expected


def test_removed_is_cancelled(browser: Any, server: Server) -> None:
    for page in opened(browser, server):
        page.locator("#mode").select_option("continue")
        page.get_by_label("Most tokens").fill("450")
        page.get_by_label("Text to go on from").fill(PROMPT)
        page.keyboard.press("Enter")
        expect(page.locator("#kept")).to_have_text(re.compile("of"))
        page.get_by_role("button", name="Remove It was a bright").click()
        wait_until(lambda: server.engine.stats().n_active == 0)
        assert page.locator("#log").text_content() == ""


MARKDOWN = """# Title
A *b* **c** `<i>` [ok](https://example.org/a) [no](javascript:alert(1)) <img src=x onerror=alert(1)>

1. one
2. two

> quoted

```html
<script>alert(1)</script>
```
"""


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It thinks, says MARKDOWN and calls a tool, to prompts of five tokens."""
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Graz"}}</tool_call>'
    said = f"<think>\nHm <b>.\n</think>\n{MARKDOWN}{call}"
    path = talking(tmp_path_factory.mktemp("talk"), {len("1uHi;"): said}, THINKS)
    with Generator(path, max_sequences=2) as generator, serving(generator) as server:
        yield server


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE])
def test_a_reply(browser: Any, talker: Server, viewport: Any) -> None:
    """Markdown is elements, made of text alone; thinking and calls are folded."""
    for page in opened(browser, talker, viewport):
        page.locator("#tools").fill(json.dumps([WEATHER]))
        page.get_by_label("Most tokens").fill("900")
        page.get_by_label("Message").fill("Hi")
        page.keyboard.press("Enter")
        end(page)
        for _ in range(2):  # as it was written, and as it was kept
            content = page.locator(".message.assistant .content")
            expect(content.locator("h3")).to_have_text("Title")
            expect(content.locator("em")).to_have_text("b")
            expect(content.locator("strong")).to_have_text("c")
            expect(content.locator("p code")).to_have_text("<i>")
            expect(content.locator("ol li")).to_have_text(["one", "two"])
            expect(content.locator("blockquote")).to_have_text("quoted")
            expect(content.locator("pre code")).to_have_text("<script>alert(1)</script>")
            expect(content.locator("a")).to_have_attribute("href", "https://example.org/a")
            assert content.locator("img, script, i, b").count() == 0
            expect(content).to_contain_text("[no](javascript:alert(1)) <img src=x")
            folded = page.locator(".message details")
            expect(folded.locator("summary")).to_have_text(["Thinking", "Calls weather"])
            expect(folded.locator("pre").nth(0)).to_be_hidden()
            folded.nth(0).locator("summary").click()
            expect(folded.locator("pre").nth(0)).to_have_text("Hm <b>.")
            assert json.loads(folded.locator("pre").nth(1).text_content()) == {"city": "Graz"}
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= page.viewport_size["width"]
            page.reload()
            expect(page.locator("#about")).to_contain_text("tiny")


def test_an_attached_file(browser: Any, server: Server, tmp_path: Path) -> None:
    notes, picture = tmp_path / "notes.txt", tmp_path / "picture.png"
    notes.write_text("Sail at dawn.")
    picture.write_bytes(b"\x89PNG\r\n")
    for page in opened(browser, server):
        page.get_by_label("Most tokens").fill("3")
        page.get_by_label("Attach a text file").set_input_files(picture)
        expect(page.get_by_role("alert")).to_contain_text("picture.png is not text")
        page.get_by_label("Attach a text file").set_input_files(notes)
        expect(page.locator("#attached")).to_contain_text("notes.txt")
        page.get_by_label("Message").fill("When?")
        page.keyboard.press("Enter")
        end(page)
        sent = "When?\n\nnotes.txt:\n```\nSail at dawn.\n```"
        assert page.locator(".message.user").text_content() == sent
        expect(page.locator("#attached")).to_have_text("")


def test_stop_before_the_first_piece(
    browser: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as if nothing had been said."""

    begun, goes_on = threading.Event(), threading.Event()

    def pause(*_: Any) -> None:
        """In the middle of a step, before its token is chosen."""
        begun.set()
        assert goes_on.wait(PATIENCE), "stuck"

    submit = partial(server.engine.submit, constraint=pause)
    for page in opened(browser, server):
        with monkeypatch.context() as patch:
            patch.setattr(server.engine, "submit", submit)
            page.get_by_label("Message").fill("Where is the ship?")
            page.get_by_role("button", name="Send").click()
            assert begun.wait(PATIENCE), "stuck"
            page.get_by_role("button", name="Stop").click()
            end(page)
            goes_on.set()
        expect(page.get_by_label("Message")).to_have_value("Where is the ship?")
        assert page.locator(".message").count() == 0
        wait_until(lambda: server.engine.stats().n_active == 0)


def test_limits_of_a_model_that_was_not_loaded(browser: Any, tiny_opt: Path) -> None:
    def load(opened: ExitStack) -> Service:
        return Service(opened.enter_context(Generator(tiny_opt, **CACHE)), name="tiny")

    with serving_catalog(Catalog([Entry("tiny", load), Entry("other", load)])) as server:
        for page in opened(browser, server):
            expect(page.locator("#about")).to_have_text("tiny")
            go_on(page, PROMPT, 5)
            expect(page.locator("#about")).to_contain_text("tiny · context of 512 tokens")
            expect(page.locator("#memory")).to_contain_text("KiB")


def test_key(browser: Any, tiny_opt: Path) -> None:
    with (
        Generator(tiny_opt, threads=1) as generator,
        serving(generator, api_key="sesame") as server,
    ):
        page = browser.new_page()
        page.goto(server.url)
        expect(page.get_by_role("alert")).to_contain_text("API key")
        page.get_by_label("API key").fill("sesame")
        page.keyboard.press("Tab")
        expect(page.locator("#about")).to_contain_text("tiny")
        go_on(page, PROMPT, 5)
        assert page.locator("#log").text_content().startswith(PROMPT + " ")
        page.close()
