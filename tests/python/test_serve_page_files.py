"""The page at / in a headless Chromium: files as long as a book."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")

from h2o_cpp import Generator
from h2o_cpp.serve.options import Defaults
from support.page import DROP, NEEDS_CHROMIUM, end, expect, opened, say
from support.scripted_chat import PLAIN
from support.serving import FOREVER, serving, wait_until

pytestmark = NEEDS_CHROMIUM
LLAMA = Path(__file__).parents[1] / "data" / "golden" / "llama_gqa2_tied.gguf"  # trained on 40

ANSWER = Defaults(sampling={"logit_bias": {5: 100.0}})  # "b", of which the page shows something


def test_a_dropped_book(browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent as a whole; the page shows its beginning, and how much of it was read."""
    monkeypatch.setattr("h2o_cpp.serve.generation_response._PING_SECONDS", 0.05)
    book = "Once upon a time. " * 12_000
    with (
        Generator(LLAMA, hh=12, n_batch=8, threads=1, max_sequences=1) as generator,
        serving(generator, template=PLAIN, max_tokens=10**9, defaults=ANSWER) as server,
    ):
        for page in opened(browser, server):
            page.evaluate(DROP, ["huge.txt", "a" * (6 * 2**20 + 1)])
            expect(page.locator("#error")).to_contain_text("too large: at most 6.0 MiB")
            page.evaluate(DROP, ["book.txt", book])
            page.get_by_label("Length").fill("5")
            other = server.begin({"prompt": [5, 6], **FOREVER})
            wait_until(lambda: server.engine.stats().n_active == 1)
            say(page, "Who?")
            reading = page.locator(".reading")
            expect(reading).to_have_text(re.compile(r"Read 0 of [\d,]+ tokens"))
            expect(reading.get_by_role("progressbar")).to_be_visible()
            other.close()
            end(page)
            expect(reading).to_be_hidden()
            assert "b" in page.locator(".message.assistant").text_content()
            shown = page.locator(".message.user").text_content()
            sent = f"Who?\n\nbook.txt:\n```\n{book}\n```"
            assert shown == f"{sent[:20_000]}… and {len(sent) - 20_000:,} more characters"
            n_tokens = server.metric("h2o_prompt_tokens_total")
            assert n_tokens > 4 * 12_000
            text = "getComputedStyle(document.getElementById('tokens'), '::before').content"
            assert "too long to be shown word by word" in page.evaluate(text)
            assert page.locator("#tokens span").count() == 0
            page.get_by_role("button", name="New chat").click()
            assert "The words of the conversation" in page.evaluate(text)
