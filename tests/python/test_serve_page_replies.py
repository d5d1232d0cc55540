"""Replies of the page: Markdown, following, branches, continuing, settings, files and the cache."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from support.needs import packages
from support.page import (
    DESKTOP,
    DROP,
    NEEDS_CHROMIUM,
    PHONE,
    TABLET,
    choose,
    end,
    expect,
    hide_memory,
    open_settings,
    opened,
    say,
    show_memory,
)
from support.scripted_chat import PLAIN
from support.serving import Server, serving, wait_until
from support.tool_talk import THINKS, talking

pytestmark = NEEDS_CHROMIUM
SIZES = pytest.mark.parametrize("viewport", [DESKTOP, TABLET, PHONE], ids=lambda one: one["width"])
ALL = r"""| left | right |
|---|--:|
| 1 | 2 |

- one
  - nested
- [x] done

---

[H2O](https://example.org/Water_(molecule)) **2 * 3** __b__ ~~no~~ ![cat](https://example.org/c.png)

1. step
   ```py
   x = "1"
   ```

$$x^2$$ and \(y\) and $z$ for $5 or $6

\[
a
\]

سلام دنیا
"""
STEPS = "".join(
    f"## Step {i}\n\nDo **{i}**.\n\n```sh\nrun {i}\nand {i}\n```\n\n- one\n- two\n\n"
    for i in range(1, 13)
)
SHORT, MIDDLE, LONG = "Hi", "Hi " + "!" * 300, "Hi " + "?" * 400


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It says ALL to SHORT, and other texts to longer messages; a token for each byte."""
    said: dict[int, str | list[int]] = {
        len(f"u{SHORT};"): ALL,
        len(f"u{MIDDLE};"): "Middle",
        len(f"u{LONG};"): "Last",
    }
    path = talking(tmp_path_factory.mktemp("talk"), said, THINKS)
    with Generator(path, max_sequences=2) as generator, serving(generator) as server:
        yield server


@pytest.fixture(scope="module")
def stepper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It says STEPS."""
    path = talking(tmp_path_factory.mktemp("talk"), {len(f"u{SHORT};"): STEPS}, THINKS)
    with Generator(path, max_sequences=2) as generator, serving(generator) as server:
        yield server


@pytest.fixture(scope="module")
def storyteller(tiny_opt: Path) -> Iterator[Server]:
    with (
        Generator(tiny_opt, max_sequences=2, hh=64, n_ctx=512, threads=1) as generator,
        serving(generator, template=PLAIN) as server,
    ):
        yield server


@pytest.fixture
def page(browser: Any, talker: Server) -> Iterator[Any]:
    for page in opened(browser, talker):
        page.get_by_label("Length").fill("900")
        yield page


def reply(page: Any) -> Any:
    return page.locator(".message.assistant .content").last


@pytest.mark.parametrize("repeat", ["written", "stored"])
def test_markdown(page: Any, repeat: str) -> None:
    """A reply that is shown piece by piece looks as if it were shown at once."""
    say(page, SHORT)
    end(page)
    if repeat == "stored":
        expect(reply(page).locator(".katex")).to_have_count(4)
        expect(reply(page).locator(".hljs-string")).to_have_count(1)
        written = reply(page).inner_html()
        page.reload()
        wait_until(lambda: reply(page).inner_html() == written)
    content = reply(page)
    expect(content.locator("td")).to_have_text(["1", "2"])
    expect(content.locator("td").nth(1)).to_have_css("text-align", "right")
    expect(content.locator("ul ul li")).to_have_text("nested")
    expect(content.get_by_role("checkbox")).to_be_checked()
    expect(content.locator("hr")).to_have_count(1)
    expect(content.locator("a").first).to_have_attribute(
        "href", "https://example.org/Water_(molecule)"
    )
    expect(content.locator("strong")).to_have_text(["2 * 3", "b"])
    expect(content.locator("s")).to_have_text("no")
    expect(content.locator("img")).to_have_count(0)  # nothing is asked of other servers
    expect(content.locator("a").nth(1)).to_have_text("cat")
    expect(content.locator("li pre code")).to_have_text('x = "1"\n')
    expect(content.locator("pre code .hljs-string")).to_have_text('"1"')
    expect(content.locator(".katex-display .katex-html")).to_have_count(2)
    expect(content.locator(".katex")).to_have_count(4)
    expect(content).to_contain_text("for $5 or $6")
    for kind, direction in (("td", "ltr"), ("p:last-child", "rtl")):
        expect(content.locator(kind).last).to_have_css("direction", direction)
    fonts = page.evaluate("document.fonts.ready.then((all) => [...all].map((one) => one.status))")
    assert "error" not in fonts
    assert "loaded" in fonts


def has_copied(page: Any, text: str) -> bool:
    return bool(page.evaluate("navigator.clipboard.readText()") == text)


def test_copy(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    say(page, SHORT)
    end(page)
    turn = page.get_by_label("Reply").get_by_role("button", name="Copy")
    for button, text in ((turn.first, 'x = "1"\n'), (turn.last, ALL)):
        button.click()
        wait_until(partial(has_copied, page, text))


@contextmanager
def slowly(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A token takes at least 4 ms."""

    def pause(_: Any, mask: Any) -> None:
        mask[:] = 0xFFFFFFFF  # all tokens are allowed
        time.sleep(0.004)

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "submit", partial(server.engine.submit, constraint=pause))
        yield


WATCH = """() => {
  const log = document.getElementById("log");
  window.seen = [];
  const look = () => {
    const isWriting = document.querySelector(".writing");
    if (isWriting) seen.push([log.scrollTop, log.scrollHeight - log.clientHeight]);
    requestAnimationFrame(look);
  };
  look();
}"""


def test_the_end_is_followed(
    browser: Any, stepper: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never moves up, and what was shown is not made again."""
    for page in opened(browser, stepper, {"width": 900, "height": 500}):
        page.get_by_label("Length").fill("900")
        page.evaluate(WATCH)
        with slowly(stepper, monkeypatch):
            say(page, SHORT)
            expect(page.locator(".block h4").nth(1)).to_be_visible()
            page.locator(".block").first.evaluate("(block) => { block.isFirst = true; }")
            end(page)
        seen = page.evaluate("seen")
        tops = [top for top, _ in seen]
        assert tops == sorted(tops)
        assert all(most - top <= 2 for top, most in seen[1:])
        assert tops[-1] > 500
        assert page.locator(".block").first.evaluate("(block) => block.isFirst")


def test_who_scrolls_up_stays_there(
    browser: Any, stepper: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for page in opened(browser, stepper, {"width": 900, "height": 500}):
        page.get_by_label("Length").fill("900")
        log = page.locator("#log")
        with slowly(stepper, monkeypatch):
            say(page, SHORT)
            expect(page.locator(".block h4").nth(3)).to_be_visible()
            log.hover()
            page.mouse.wheel(0, -60)
            expect(page.get_by_role("button", name="Jump to the end")).to_be_visible()
            top = log.evaluate("(log) => log.scrollTop")
            end(page)
        assert log.evaluate("(log) => log.scrollTop") == top
        page.get_by_role("button", name="Jump to the end").click()
        left = "(log) => log.scrollHeight - log.scrollTop - log.clientHeight"
        assert log.evaluate(left) <= 2
        expect(page.get_by_role("button", name="Jump to the end")).to_be_hidden()


def test_versions(page: Any) -> None:
    """A question that is edited and a reply that is written again leave the others there."""
    say(page, SHORT)
    end(page)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill(MIDDLE)
    page.keyboard.press("Enter")
    end(page)
    expect(reply(page)).to_have_text("Middle")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill(LONG)
    page.get_by_role("button", name="Save").click()
    end(page)
    expect(reply(page)).to_have_text("Last")
    page.get_by_role("button", name="Regenerate").click()
    end(page)
    expect(page.get_by_label("Version 3 of 3")).to_be_visible()
    expect(page.get_by_label("Version 2 of 2")).to_be_visible()
    page.get_by_role("button", name="Previous version").first.click()
    expect(reply(page)).to_have_text("Middle")
    page.reload()
    expect(reply(page)).to_have_text("Middle")
    page.get_by_role("button", name="Next version").click()
    expect(reply(page)).to_have_text("Last")
    expect(page.get_by_label("Version 2 of 2")).to_be_visible()
    page.get_by_role("button", name="Edit").click()
    page.keyboard.press("Escape")
    expect(page.locator(".message.user")).to_have_text(LONG)


def test_continue(page: Any) -> None:
    """A reply that was cut at the limit, or stopped, goes on where it ended."""
    page.get_by_label("Length").fill("20")
    say(page, SHORT)
    end(page)
    expect(page.locator(".cut")).to_contain_text("Cut off at the length limit.")
    page.reload()
    expect(page.locator(".cut")).to_contain_text("Cut off at the length limit.")
    page.get_by_label("Length").fill("900")
    page.get_by_role("button", name="Continue").click()
    end(page)
    expect(page.locator(".cut")).to_be_hidden()
    expect(reply(page).locator("td")).to_have_text(["1", "2"])
    expect(reply(page)).to_contain_text("سلام دنیا")
    expect(page.locator(".message")).to_have_count(2)


def test_stopped_reply_is_marked(
    browser: Any, stepper: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for page in opened(browser, stepper):
        page.get_by_label("Length").fill("900")
        with slowly(stepper, monkeypatch):
            say(page, SHORT)
            expect(page.locator(".block h4").first).to_be_visible()
            page.get_by_role("button", name="Stop").click()
            end(page)
        expect(page.locator(".cut")).to_contain_text("Cut off: it was stopped.")
        page.get_by_role("button", name="Continue").click()
        end(page)
        expect(reply(page)).to_contain_text("Step 12")


def test_settings_stay(page: Any) -> None:
    asked: list[Any] = []
    page.on("request", lambda one: asked.append(one) if one.method == "POST" else None)
    choose(page, System_prompt="Be brief.", Temperature="0.3", API_key="sesame")
    page.get_by_label("Length").fill("7")
    page.get_by_label("Budget").fill("0.5")
    for _ in range(2):
        say(page, SHORT)
        end(page)
        body = json.loads(asked[-1].post_data)
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (body["temperature"], body["max_tokens"], body["hh"]) == (0.3, 7, 0.5)
        assert asked[-1].headers["authorization"] == "Bearer sesame"
        page.reload()
        expect(page.locator("#about")).to_contain_text("tiny")
    open_settings(page)
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    page.get_by_label("Appearance").select_option("Dark")
    page.get_by_role("button", name="Close").click()
    page.reload()
    expect(page.locator("body")).to_have_css("background-color", "rgb(23, 25, 28)")


def test_dropped_files(page: Any) -> None:
    page.evaluate(DROP, ["a.txt", "Sail at dawn."])
    page.evaluate(DROP, ["b.txt", "Or at noon."])
    files = page.get_by_label("Attached files").get_by_role("listitem")
    expect(files).to_have_count(2)
    page.get_by_role("button", name="Remove a.txt").click()
    expect(files).to_have_text(["b.txt, 0 KiB"])
    say(page, "When?")
    end(page)
    sent = "When?\n\nb.txt:\n```\nOr at noon.\n```"
    assert page.locator(".message.user").text_content() == sent


def test_archived_words_are_not_called_forgotten(browser: Any, tiny_opt: Path) -> None:
    with (
        Generator(tiny_opt, hh=64, n_ctx=512, archive="q8_0", threads=1) as generator,
        serving(generator, template=PLAIN) as server,
    ):
        for page in opened(browser, server):
            expect(page.locator("#evicted-name")).to_have_text("In the archive")
            page.get_by_label("Length").fill("200")
            say(page, "Where is the ship?")
            end(page)
            read_again = page.locator("#tokens .recalled")
            expect(page.locator("#evicted")).to_contain_text(f"read again: {read_again.count()}")
            read_again.first.hover()
            expect(page.locator("#detail")).to_contain_text("read again from the archive by")
            expect(page.locator("#legend-recalled")).to_be_visible()


def test_the_past_of_the_cache(browser: Any, storyteller: Server) -> None:
    """At an earlier moment, fewer words are forgotten, and later ones are not there yet."""
    for page in opened(browser, storyteller):
        choose(page, Temperature="0")
        page.get_by_label("Length").fill("200")
        say(page, "Where is the ship?")
        end(page)
        count = page.locator("#tokens span").count()
        evicted = page.locator("#tokens .evicted").count()
        assert evicted > 0
        moment = page.get_by_label("Moment")
        moment.focus()
        page.keyboard.press("Home")
        expect(page.locator("#tokens .evicted")).to_have_count(0)
        later = page.locator("#tokens .later").count()
        assert 0 < later < count
        page.keyboard.press("End")
        expect(page.locator("#tokens .later")).to_have_count(0)
        assert page.locator("#tokens .evicted").count() == evicted
        expect(page.locator("#timeline-text")).to_contain_text("It began to forget after")
        kept = page.locator("#kept").inner_text()
        page.reload()  # it is stored with the conversation
        expect(page.locator("#kept")).to_have_text(kept)
        expect(page.locator("#tokens span")).to_have_count(count)
        assert page.locator("#tokens .evicted").count() == evicted


@packages("llguidance")
def test_what_a_budget_would_cost(browser: Any, storyteller: Server) -> None:
    for page in opened(browser, storyteller):
        page.get_by_label("Length").fill("100")
        say(page, "Where is the ship?")
        end(page)
        page.get_by_role("button", name="Try smaller budgets").click()
        rows = page.locator("#trial tbody tr")
        expect(
            page.get_by_text("enough for this reply").or_(page.get_by_text("less sure of these"))
        ).to_be_visible()
        expect(rows).to_have_count(4)
        expect(rows.nth(0)).to_contain_text("64 tokens")
        expect(rows.nth(0)).to_contain_text("as sure as now")
        expect(rows.nth(3)).to_contain_text("less sure")
        rows.nth(1).get_by_role("button", name="Use").click()
        expect(page.get_by_label("Budget")).to_have_value("32")
        expect(page.locator("#budget-cost")).to_contain_text("Remembers 32 of at most 512 tokens")


CONTROLS = "button, input, select, textarea, [role], [tabindex]"
NAMELESS = """(controls) => [...document.querySelectorAll(controls)]
  .filter((one) => !["alert", "status"].includes(one.getAttribute("role")))
  .filter((one) => !(one.ariaLabel || one.title || one.textContent.trim() || one.labels?.length))
  .map((one) => one.outerHTML)"""


WIDE = r"""## What a cache keeps

A cache of **64 tokens** for a text of $n$ tokens takes $\frac{64}{n}$ of the memory:

| tokens | full cache | 64 tokens | of the memory |
|---:|---:|---:|---:|
| 64 | 0.3 MiB | 0.3 MiB | 100% |
| 512 | 2.3 MiB | 0.3 MiB | 13% |

$$\text{score}_i = \sum_{t > i} \text{softmax}\left(\frac{q_t K^\top}{\sqrt{d}}\right)_i$$

```python
def evict(scores, n_recent, budget):
    # Heavy hitters, and the most recent tokens.
    old = sorted(range(len(scores) - n_recent), key=scores.__getitem__)
    return sorted(old[n_recent - budget :]) + [*range(len(scores) - n_recent, len(scores))]
```

- [x] the first words stay
- [ ] forgotten words come back
"""
PICTURES = {
    (1200, "light", "reply"): "page_desktop.png",
    (820, "dark", "markdown"): "page_tablet.png",
    (360, "light", "reply"): "page_phone.png",
    (360, "dark", "memory"): "page_phone_memory.png",
}


def look(page: Any, what: str) -> None:
    width, folder = page.viewport_size["width"], os.environ.get("H2O_SCREENSHOTS")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(NAMELESS, CONTROLS) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if folder and (name := PICTURES.get((width, scheme, what))):
            page.screenshot(path=Path(folder) / name)


@SIZES
def test_sizes(browser: Any, storyteller: Server, viewport: Any) -> None:
    """At each width, in both colors, everything has a name, and nothing is wider than the page.

    H2O_SCREENSHOTS=docs makes the pictures of the documentation.
    """
    for page in opened(browser, storyteller, viewport):
        look(page, "empty")
        choose(page, Temperature="0.8")
        page.get_by_label("Length").fill("180")
        say(page, "What did the old man see from the ship?")
        end(page)
        show_memory(page)
        page.locator("#cache").evaluate("(cache) => { cache.scrollTop = 0; }")
        look(page, "memory")
        hide_memory(page)
        look(page, "reply")
        open_settings(page)
        look(page, "settings")
        page.keyboard.press("Escape")
        expect(page.get_by_label("System prompt")).to_be_hidden()
        said = [{"role": "user", "content": "What does it keep?"}]
        said += [{"role": "assistant", "content": WIDE}]
        old = [{"mode": "chat", "text": "", "messages": said}]
        page.evaluate(f"localStorage.setItem('h2o.conversations', {json.dumps(json.dumps(old))})")
        page.reload()
        expect(page.locator(".katex-display")).to_be_visible()
        look(page, "markdown")


def test_drawers_on_a_phone(browser: Any, storyteller: Server) -> None:
    """A drawer keeps the focus within it; Escape closes it, and the focus goes back."""
    for page in opened(browser, storyteller, PHONE):
        for opener, drawer in (("Conversations", "#sidebar"), ("Memory", "#cache")):
            button = page.get_by_role("button", name=opener)
            button.click()
            expect(page.locator(drawer)).to_be_visible()
            expect(button).to_have_attribute("aria-expanded", "true")
            for _ in range(12):
                page.keyboard.press("Tab")
                focused = "document.activeElement.closest('main')"
                assert page.evaluate(f"{focused} === null")
            page.locator(drawer).get_by_role("button").first.focus()
            page.keyboard.press("Escape")
            expect(page.locator(drawer)).to_be_hidden()
            expect(button).to_be_focused()
