"""Tokens that continue a prompt, for tests of what decides them."""

from __future__ import annotations

from typing import Any

from h2o_cpp import Generator
from support.background import PROMPT

PLAIN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # the whole distribution


def generate(generator: Generator, n: int = 60, **options: Any) -> list[int]:
    """The tokens that continue PROMPT."""
    stream = generator.stream(PROMPT, max_tokens=n, ignore_eos=True, **options)
    for _ in stream:
        pass
    assert len(stream.tokens) == n
    return list(stream.tokens)
