"""The page at / in a headless Chromium, and what a user does there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.background import PATIENCE
from support.needs import needs
from support.serving import Server

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect as expect
from playwright.sync_api import sync_playwright

expect.set_options(timeout=PATIENCE * 1000)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEEDS_CHROMIUM = needs("other programs", CHROMIUM is not None)
_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP, TABLET, PHONE = (
    {"width": 1200, "height": 800},
    {"width": 820, "height": 1100},
    {"width": 360, "height": 740},
)

# Drops a file, given as its name and text.
DROP = """([name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name, { type: "text/plain" }));
  for (const kind of ["dragenter", "dragover", "drop"]) {
    const event = new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
    document.getElementById("log").dispatchEvent(event);
  }
}"""


@contextmanager
def chromium() -> Iterator[Any]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_OPTIONS)
        yield browser
        browser.close()


def opened(browser: Any, server: Server, viewport: Any = DESKTOP) -> Iterator[Any]:
    """The page, which must not make the browser complain. Its storage is empty."""
    context = browser.new_context(viewport=viewport)
    page = context.new_page()
    complaints = watched(page)
    page.goto(server.url)
    expect(page.locator("#about")).to_contain_text("tiny")
    yield page
    context.close()
    assert complaints == []


def watched(page: Any) -> list[str]:
    """Complaints of the browser, as they come; not refusals by the server."""
    complaints: list[str] = []

    def note(text: str) -> None:
        if "status of 4" not in text:
            complaints.append(text)

    page.on("console", lambda one: note(one.text) if one.type == "error" else None)
    page.on("pageerror", lambda error: note(str(error)))
    return complaints


def say(page: Any, message: str) -> None:
    """Send a message."""
    page.get_by_label("Write a message").fill(message)
    page.keyboard.press("Enter")


def end(page: Any) -> None:
    """Wait until the answer is there."""
    expect(page.get_by_role("button", name="Stop")).to_be_hidden(timeout=30_000)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def open_settings(page: Any) -> None:
    menu = page.get_by_role("button", name="Conversations")
    if menu.is_visible():
        menu.click()
    page.get_by_role("button", name="Settings").click()


def choose(page: Any, **values: str) -> None:
    """Fill in settings by their labels."""
    open_settings(page)
    for label, value in values.items():
        page.get_by_label(label.replace("_", " ")).fill(value)
    page.get_by_role("button", name="Close").click()


def begin_text(page: Any, prompt: str, n: int) -> None:
    """Begin to continue a text greedily; what is written in it already stays."""
    choose(page, Temperature="0")
    if page.locator("#mode").is_visible():
        page.locator("#mode").select_option("continue")
    page.get_by_label("Length").fill(str(n))
    page.get_by_label("Write the beginning of a text").fill(prompt)
    page.keyboard.press("Enter")


def go_on(page: Any, prompt: str, n: int) -> None:
    begin_text(page, prompt, n)
    end(page)


def shows(page: Any, text: str) -> None:
    """Wait for a conversation of exactly this text."""
    expect(page.locator("#log")).to_have_js_property("textContent", text)


def show_memory(page: Any) -> None:
    """Where it is not shown beside the conversation."""
    if not page.locator("#cache").is_visible():
        page.get_by_role("button", name="Memory").click()


def hide_memory(page: Any) -> None:
    if page.get_by_role("button", name="Hide").is_visible():
        page.get_by_role("button", name="Hide").click()
