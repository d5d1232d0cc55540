"""Requests of each API can turn drafts off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="FastAPI is not installed (extra: serve)")

from h2o_cpp import Generator
from support.serving import serving

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "the cat sat on the mat. the cat sat on the mat. the"}]
OPTIONS = {"temperature": 0, "stream": False}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 40},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 40},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 40},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 40, "temperature": 0}},
    "/api/generate": {
        "prompt": MESSAGES[0]["content"], "raw": True,
        "options": {"num_predict": 40, "temperature": 0},
    },
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_drafts_of_a_request(tiny_opt: Path, path: str) -> None:
    body = BODIES[path] | ({"stream": False} if path.startswith("/api") else OPTIONS)
    with (
        Generator(tiny_opt, lossless=True, hh=8, n_ctx=200, threads=1, max_sequences=1) as one,
        serving(one, template=TEMPLATE) as server,
    ):

        def drafted(**options: bool) -> int:
            answer = server.ask(path, body | options)
            assert answer.status == 200
            return server.engine.stats().drafted_tokens

        assert drafted(draft=False) == 0
        assert drafted() > 0
