"""The page at / in a headless Chromium: keyboard, phone width, and Generator's text."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")

from h2o_cpp import Generator
from h2o_cpp.serve.catalog import Catalog, Entry
from h2o_cpp.serve.service import Service
from support.background import PATIENCE
from support.page import (
    DESKTOP,
    NEEDS_CHROMIUM,
    PHONE,
    begin_text,
    choose,
    end,
    expect,
    go_on,
    hide_memory,
    opened,
    show_memory,
    shows,
)
from support.scripted_chat import PLAIN
from support.serving import Server, serving, serving_catalog, wait_until
from support.tool_talk import THINKS, WEATHER, talking

pytestmark = NEEDS_CHROMIUM
PROMPT = "It was a bright morning, and the old man went down to the sea with"
CACHE: dict[str, Any] = {"hh": 40, "n_ctx": 512, "threads": 1}


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


def test_a_text_and_its_cache(page: Any, tiny_opt: Path) -> None:
    go_on(page, PROMPT, 120)
    show_memory(page)
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


def test_keyboard(page: Any) -> None:
    """Every control can be reached, tokens are told one by one, Escape stops."""
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    is_wide = page.locator("#new").is_visible()
    order = ["new", "search", "open-settings"] if is_wide else ["open-sidebar", "new-small"]
    order += ["toggle-cache", "log", "say", "attach", "mode", "max-tokens", "send"]
    order += ["tokens", "budget"] if is_wide else []
    assert [name for name in reached if name in order][: len(order)] == order
    go_on(page, PROMPT, 30)
    show_memory(page)
    page.locator("#tokens").focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#detail")).to_contain_text('Position 1 · "It" · ')
    page.keyboard.press("End")
    expect(page.locator("#detail")).to_contain_text("recent · kept by 100 % of the heads")
    hide_memory(page)
    begin_text(page, " and", 400)
    expect(page.locator("#kept")).to_have_text(re.compile("^40 of"), timeout=30_000)
    page.keyboard.press("Escape")
    end(page)


def test_nothing_is_wider_than_the_page(page: Any) -> None:
    go_on(page, "supercalifragilistic" * 12, 40)
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_chat(browser: Any, server: Server, tiny_opt: Path) -> None:
    """Has two turns; then a new one."""
    for page in opened(browser, server):
        choose(page, Temperature="0")
        page.get_by_label("Length").fill("25")
        said: list[dict[str, str]] = []
        with Generator(tiny_opt, **CACHE) as alone:
            for message in ("Where is the ship?", "And\nthe captain?"):
                page.get_by_label("Write a message").fill(message)
                page.get_by_role("button", name="Send").click()
                end(page)
                said.append({"role": "user", "content": message})
                stream = alone.chat(said, template=PLAIN, max_tokens=25, temperature=0)
                said.append({"role": "assistant", "content": "".join(stream)})
        found = page.locator(".message .content").all_text_contents()
        assert ["".join(one.split()) for one in found] == [
            "".join(one["content"].split()) for one in said
        ]
        page.get_by_role("button", name="New chat").click()
        assert page.locator(".message").count() == 0


def test_what_is_kept_of_each_message(browser: Any, server: Server, tiny_opt: Path) -> None:
    """The server's shares, in words; a warning about instructions and turns that are lost."""
    system = "Be brief."
    said = [{"role": "system", "content": system}]
    for page in opened(browser, server):
        choose(page, Temperature="0", System_prompt=system)
        page.get_by_label("Length").fill("60")
        page.get_by_label("Budget").fill("2")
        with Generator(tiny_opt, **{**CACHE, "hh": 2}) as alone:
            for turn in range(3):
                page.get_by_label("Write a message").fill(f"Where is ship {turn}?")
                page.keyboard.press("Enter")
                end(page)
                said.append({"role": "user", "content": f"Where is ship {turn}?"})
                stream = alone.chat(said, template=PLAIN, max_tokens=60, temperature=0)
                said.append({"role": "assistant", "content": "".join(stream)})
        first, *shares = (share or 0 for share in stream.prompt_memory.messages)
        assert first == 0
        assert any(0 < share < 1 for share in shares)
        labels = page.locator(".turn .kept").all_text_contents()
        assert labels == [
            "forgotten" if share == 0 else f"{100 * share // 1:.0f}% kept" if share < 1 else ""
            for share in shares
        ] + [""]
        faded = page.locator(".turn.faded")
        assert faded.count() == sum(share < 1 for share in shares)
        opacities = faded.locator(".message").evaluate_all(
            "all => all.map(one => getComputedStyle(one).opacity)"
        )
        assert [float(one) for one in opacities] == pytest.approx(
            [0.6 + 0.4 * share for share in shares if share < 1], abs=1e-5
        )
        turns = sum(shares[i] == shares[i + 1] == 0 for i in range(0, 4, 2))
        lost = "one earlier turn" if turns == 1 else f"{turns} earlier turns"
        expect(page.locator("#forgot")).to_have_text(
            f"The model has forgotten the system prompt and {lost}."
        )
        page.reload()
        expect(page.locator("#forgot")).to_contain_text("forgotten the system prompt")
        assert page.locator(".turn .kept").all_text_contents() == labels
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("#forgot")).to_be_hidden()


def test_budget_of_a_text(browser: Any, server: Server) -> None:
    for page in opened(browser, server):
        page.get_by_label("Budget").fill("12")
        go_on(page, PROMPT, 60)
        expect(page.locator("#kept")).to_have_text(re.compile("^12 of"))
        for wrong, message in (("much", "a fraction or a number"), ("300", "slots")):
            page.get_by_label("Budget").fill(wrong)
            page.get_by_label("Write the beginning of a text").fill(" and")
            page.keyboard.press("Enter")
            expect(page.get_by_role("alert")).to_contain_text(message)
            end(page)
            expect(page.get_by_label("Write the beginning of a text")).to_have_value(" and")


def test_two_conversations_at_once(browser: Any, server: Server, tiny_opt: Path) -> None:
    """Both are complete, whichever is shown while they run, and after a reload."""
    with Generator(tiny_opt, **CACHE) as alone:
        expected = PROMPT + alone.generate(PROMPT, max_tokens=450, temperature=0).text
    for page in opened(browser, server):
        begin_text(page, PROMPT, 450)
        expect(page.locator("#kept")).to_have_text(re.compile("of"))
        page.get_by_role("button", name="New chat").click()
        shows(page, "")
        go_on(page, "The king", 5)
        names = page.locator("#conversations button:not(.remove)")
        expect(names).to_have_count(2)
        names.filter(has_text="bright morning").click()
        end(page)
        shows(page, expected)
        expect(page.locator("#kept")).to_have_text(re.compile("^40 of"))
        page.reload()
        names.filter(has_text="bright morning").click()
        shows(page, expected)
        page.get_by_role("button", name="Delete It was a bright").click()
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
            begin_text(page, PROMPT, 20)
            assert begun.wait(PATIENCE), "stuck"
            page.get_by_role("button", name="New chat").click()
            page.locator("#conversations button").filter(has_text="It was a bright").first.click()
            expect(page.get_by_role("button", name="Stop")).to_be_enabled()
            resume.set()
        end(page)
        shows(page, expected)


def test_removed_is_cancelled(browser: Any, server: Server) -> None:
    for page in opened(browser, server):
        begin_text(page, PROMPT, 450)
        expect(page.locator("#kept")).to_have_text(re.compile("of"))
        page.get_by_role("button", name="Delete It was a bright").click()
        wait_until(lambda: server.engine.stats().n_active == 0)
        shows(page, "")


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
        choose(page, Tools=json.dumps([WEATHER]))
        page.get_by_label("Length").fill("900")
        page.get_by_label("Write a message").fill("Hi")
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
        page.get_by_label("Length").fill("3")
        page.get_by_label("Attach a text file").set_input_files(picture)
        expect(page.get_by_role("alert")).to_contain_text("picture.png is not text")
        page.get_by_label("Attach a text file").set_input_files(notes)
        expect(page.locator("#attached")).to_contain_text("notes.txt")
        page.get_by_label("Write a message").fill("When?")
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
            page.get_by_label("Write a message").fill("Where is the ship?")
            page.get_by_role("button", name="Send").click()
            assert begun.wait(PATIENCE), "stuck"
            page.get_by_role("button", name="Stop").click()
            end(page)
            goes_on.set()
        expect(page.get_by_label("Write a message")).to_have_value("Where is the ship?")
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
