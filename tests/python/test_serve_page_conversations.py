"""Conversations of the page: nothing is lost by reloads, other tabs or a full storage."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from support.background import PATIENCE
from support.page import (
    NEEDS_CHROMIUM,
    end,
    expect,
    open_settings,
    opened,
    say,
    watched,
)
from support.scripted_chat import PLAIN
from support.serving import Server, serving, wait_until

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def server(tiny_opt: Path) -> Iterator[Server]:
    with (
        Generator(tiny_opt, max_sequences=2, hh=40, n_ctx=512, threads=1) as generator,
        serving(generator, template=PLAIN) as server,
    ):
        yield server


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    for page in opened(browser, server):
        page.get_by_label("Length").fill("12")
        yield page


@contextmanager
def paused(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The engine stops at the tenth token of each request, until the block ends.

    The event tells that it has stopped.
    """
    begun, resume = threading.Event(), threading.Event()
    tokens = itertools.count()

    def pause_at_tenth(_: Any, mask: Any) -> None:
        mask[:] = 0xFFFFFFFF  # all tokens are allowed
        if next(tokens) == 10:
            begun.set()
            assert resume.wait(PATIENCE), "stuck"

    with monkeypatch.context() as patch:
        submit = partial(server.engine.submit, constraint=pause_at_tenth)
        patch.setattr(server.engine, "submit", submit)
        try:
            yield begun
        finally:
            resume.set()


def replies(page: Any) -> Any:
    return page.locator(".message.assistant .content")


def names(page: Any) -> Any:
    return page.locator("#conversations .open")


def test_reload_and_closed_tab(page: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question stays, with its reply as far as it was shown, which can be continued."""
    page.get_by_label("Length").fill("60")
    with paused(server, monkeypatch) as begun:
        say(page, "Where is the ship?")
        assert begun.wait(PATIENCE), "stuck"
        expect(replies(page)).not_to_be_empty()
        shown = replies(page).inner_text()
        page.reload()
        expect(page.locator(".message.user")).to_have_text("Where is the ship?")
        expect(replies(page)).to_contain_text(shown)
        expect(page.locator(".cut")).to_contain_text("Cut off: the page was closed.")
        other = page.context.new_page()
        page.close()
        other.goto(server.url)
        expect(replies(other)).to_contain_text(shown)
    before = replies(other).inner_text()
    other.get_by_role("button", name="Continue").click()
    end(other)
    assert replies(other).inner_text().startswith(before)
    assert len(replies(other).inner_text()) > len(before)
    expect(other.locator(".message")).to_have_count(2)


def test_two_tabs(page: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shows what the other one writes, while it is written; neither loses anything."""
    other = page.context.new_page()
    complaints = watched(other)
    other.goto(server.url)
    expect(names(other)).to_have_count(0)
    page.get_by_label("Length").fill("60")
    with paused(server, monkeypatch) as begun:
        say(page, "Where is the ship?")
        assert begun.wait(PATIENCE), "stuck"
        names(other).filter(has_text="Where is the ship").click()
        wait_until(lambda: "" != replies(page).inner_text() == replies(other).inner_text())
        other.wait_for_timeout(5000)
        expect(other.locator(".cut")).to_be_hidden()
    end(page)
    expect(replies(other)).to_have_text(replies(page).inner_text())
    other.get_by_role("button", name="New chat").click()
    other.get_by_label("Length").fill("5")
    say(other, "And the captain?")
    end(other)
    expect(names(page)).to_have_count(2)
    for tab in (page, other):
        tab.reload()
        expect(names(tab)).to_have_text(["And the captain?", "Where is the ship?"])
    page.get_by_role("button", name="Delete And the captain?").click()
    expect(names(other)).to_have_text(["Where is the ship?"])
    expect(other.locator(".message.user")).to_have_text("Where is the ship?")
    other.close()
    assert complaints == []


def test_two_tabs_in_one_conversation(page: Any, server: Server) -> None:
    say(page, "One")
    end(page)
    other = page.context.new_page()
    other.goto(server.url)
    expect(replies(other)).to_have_count(1)
    other.get_by_label("Length").fill("400")
    page.get_by_label("Length").fill("400")
    for tab, text in ((page, "Two"), (other, "Three")):
        tab.get_by_label("Write a message").fill(text)
    page.get_by_role("button", name="Send").click()
    other.get_by_role("button", name="Send").click()
    end(page)
    end(other)
    found = stored(page)
    assert {one["content"] for one in found if one["role"] == "user"} == {"One", "Two", "Three"}
    assert all(one["content"] for one in found)
    other.close()


def stored(page: Any) -> list[Any]:
    """The stored messages."""
    found: list[Any] = page.evaluate(
        """() => new Promise((resolve) => {
          indexedDB.open("h2o").onsuccess = ({ target }) => {
            const messages = target.result.transaction("messages").objectStore("messages");
            messages.getAll().onsuccess = (event) => {
              target.result.close();
              resolve(event.target.result);
            };
          };
        })"""
    )
    return found


# Chromium's IndexedDB does not heed a quota set through its protocol.
FULL = """(how) => {
  window.put ??= IDBObjectStore.prototype.put;
  IDBObjectStore.prototype.put = function (...given) {
    if (how === "throws") throw new DOMException("full", "QuotaExceededError");
    const made = window.put.apply(this, given);
    this.transaction.abort();
    return made;
  };
}"""


@pytest.mark.parametrize("how", ["throws", "aborts"])
def test_full_storage(page: Any, how: str) -> None:
    """It is said, nothing that is shown goes away, and it is stored as soon as there is room."""
    say(page, "One")
    end(page)
    page.evaluate(FULL, how)
    say(page, "Two")
    end(page)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("is full: what is new is not stored")
    expect(page.locator(".message.user")).to_have_text(["One", "Two"])
    expect(replies(page)).to_have_count(2)
    assert [one["content"] for one in stored(page) if one["role"] == "user"] == ["One"]
    page.evaluate("() => { IDBObjectStore.prototype.put = window.put; }")
    say(page, "Three")
    end(page)
    expect(alert).to_be_hidden()
    shown = page.locator(".message .content").all_inner_texts()
    page.reload()
    expect(page.locator(".message .content")).to_have_text(shown)
    assert len(shown) == 6


def conversation(i: int, n: int = 6) -> dict[str, Any]:
    messages = [
        {
            "id": f"{i}-{j}",
            "parent": f"{i}-{j - 1}" if j else None,
            "role": ("user", "assistant")[j % 2],
            "content": f"{('Question', 'Answer')[j % 2]} {j} of conversation {i}. " + "word " * 200,
            "state": "done",
            "created": 1000 * i + j,
        }
        for j in range(n)
    ]
    return {
        "id": f"c{i}",
        "mode": "chat",
        "title": f"Conversation {i}",
        "created": 1000 * i,
        "updated": 1000 * i,
        "leaf": f"{i}-{n - 1}",
        "messages": messages,
    }


def import_file(page: Any, path: Path, text: str) -> None:
    open_settings(page)
    page.get_by_label("Import conversations").set_input_files(path)
    expect(page.locator("#storage")).to_contain_text(text)
    page.get_by_role("button", name="Close").click()


def export(page: Any) -> Any:
    open_settings(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    page.get_by_role("button", name="Close").click()
    return json.loads(Path(download.value.path()).read_text(encoding="utf-8"))


def test_many_conversations(page: Any, browser: Any, server: Server, tmp_path: Path) -> None:
    """500 are imported, searched, and exported as they were."""
    path = tmp_path / "all.json"
    all_ = [conversation(i) for i in range(500)]
    path.write_text(
        json.dumps({"format": "h2o.cpp conversations", "version": 1, "conversations": all_})
    )
    import_file(page, path, "500 conversations were imported.")
    expect(names(page)).to_have_count(500)
    expect(names(page).first).to_have_text("Conversation 499")
    expect(page.locator(".message")).to_have_count(6)
    page.get_by_label("Search conversations").fill("of conversation 123.")
    expect(names(page)).to_have_text(["Conversation 123"])
    names(page).click()
    expect(page.locator(".message.user").first).to_contain_text("Question 0 of conversation 123.")
    page.get_by_label("Search conversations").fill("nowhere")
    expect(page.get_by_text("Nothing was found.")).to_be_visible()
    page.get_by_label("Search conversations").fill("")
    page.get_by_role("button", name="Delete Conversation 499", exact=True).click()
    expect(names(page)).to_have_count(499)
    page.get_by_role("button", name="Undo").click()
    expect(names(page)).to_have_count(500)
    page.reload()
    expect(names(page)).to_have_count(500)
    exported = export(page)
    assert sorted(exported["conversations"], key=lambda one: one["created"]) == [
        {**one, "messages": [{**said, "conversation": one["id"]} for said in one["messages"]]}
        for one in all_
    ]
    import_file(page, path, "500 conversations were imported.")  # they are there already
    expect(names(page)).to_have_count(500)


def test_a_long_conversation(page: Any, tmp_path: Path) -> None:
    """Its end is shown first; the messages above come later and do not move it."""
    path = tmp_path / "long.json"
    path.write_text(
        json.dumps(
            {
                "format": "h2o.cpp conversations",
                "version": 1,
                "conversations": [conversation(1, 200)],
            }
        )
    )
    import_file(page, path, "1 conversation was imported.")
    messages = page.locator(".message .content")
    expect(messages).to_have_count(200)
    expect(messages.last).to_be_in_viewport()
    expect(messages.first).to_contain_text("Question 0 of conversation 1.")
    expect(messages.last).to_be_in_viewport()
    left = "(log) => log.scrollHeight - log.scrollTop - log.clientHeight"
    assert page.locator("#log").evaluate(left) <= 2


def test_what_cannot_be_imported(page: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    for text in ("no JSON", "[]", '{"format": "h2o.cpp conversations", "conversations": [{}]}'):
        wrong.write_text(text)
        import_file(page, wrong, "wrong.json is not a file of conversations.")
    expect(names(page)).to_have_count(0)


def test_export_and_import_of_what_was_said(
    page: Any, browser: Any, server: Server, tmp_path: Path
) -> None:
    """Also of a version that is not shown."""
    say(page, "One")
    end(page)
    page.get_by_role("button", name="Regenerate").click()
    end(page)
    path = tmp_path / "all.json"
    path.write_text(json.dumps(export(page)))
    shown = replies(page).inner_text()
    for other in opened(browser, server):
        import_file(other, path, "1 conversation was imported.")
        expect(replies(other)).to_have_text(shown)
        expect(other.get_by_label("Version 2 of 2")).to_be_visible()


def test_conversations_of_the_earlier_page(page: Any) -> None:
    """They were in localStorage."""
    said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "**Hi**"}]
    old = [
        {"mode": "chat", "text": "", "messages": said},
        {"mode": "continue", "text": "The king went", "messages": []},
    ]
    page.evaluate("(old) => localStorage.setItem('h2o.conversations', JSON.stringify(old))", old)
    for _ in range(2):
        page.reload()
        expect(names(page)).to_have_text(["Hello", "The king went"])
        expect(replies(page).locator("strong")).to_have_text("Hi")
    names(page).nth(1).click()
    expect(page.locator("#log")).to_have_text("The king went")
    assert page.evaluate("localStorage.getItem('h2o.conversations')") is None


def test_a_draft_stays(page: Any) -> None:
    say(page, "One")
    end(page)
    page.get_by_label("Write a message").fill("Not sent yet")
    page.reload()
    expect(page.get_by_label("Write a message")).to_have_value("Not sent yet")
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_label("Write a message")).to_have_value("")
    names(page).click()
    expect(page.get_by_label("Write a message")).to_have_value(re.compile("Not sent yet"))
