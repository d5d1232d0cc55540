"""Tokenizer.encode(most=n): rejects longer texts exactly, without encoding all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from h2o_cpp.generation.request import ContextFullError
from support.vocabularies import any_text, byte_pairs, sentence_pieces, tokenizer_of

LONG_TOKEN = "ab" * 40
KINDS: dict[str, dict[str, Any]] = {
    "bytes": byte_pairs(),
    "composed": byte_pairs(pre="qwen2"),
    "whole tokens": byte_pairs((LONG_TOKEN, 4), ("é", 4), pre="qwen2"),
    "pieces": sentence_pieces(),
    "one space": sentence_pieces(remove_extra_whitespaces=True, add_eos_token=True),
    "long pieces": sentence_pieces((LONG_TOKEN, 1), ("\u2581" * 20, 4), ("ba", 5)),
}


def without_bytes() -> dict[str, Any]:
    """Pieces of which none is a byte: any run of other characters is one unknown token."""
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1],
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
    }


KINDS["no bytes"] = without_bytes()
KINDS["few bytes"] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "</s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_is_exact(kind: str) -> None:
    t = tokenizer_of(KINDS[kind])

    @given(any_text, st.booleans())
    @example(LONG_TOKEN * 3, True)
    @example("e\u0301" * 50, False)
    @example("\u1112\u1161\u11ab" * 9, True)
    @example(" " * 99, False)
    @example("我" * 200, True)
    def check(text: str, parse_special: bool) -> None:
        tokens = t.encode(text, parse_special=parse_special)
        n = len(tokens)
        assert t.encode(text, parse_special=parse_special, most=n) == tokens
        for less in {0, n // 2, n - 1} - {n, -1}:
            with pytest.raises(ContextFullError, match=f"more than {less} tokens"):
                t.encode(text, parse_special=parse_special, most=less)

    check()


def test_of_a_conversation() -> None:
    t = tokenizer_of(byte_pairs())
    parts: list[int | str] = [256, "abc", 256, "d"]
    assert t.encode_parts(parts, most=5) == [256, 257, 99, 256, 100]
    for most in range(5):
        with pytest.raises(ContextFullError):
            t.encode_parts(parts, most=most)


@pytest.mark.parametrize("kind", ["bytes", "composed", "pieces"])
def test_does_not_read_all_of_it(kind: str) -> None:
    """Processor time of refusing a text, against tokenizing it."""
    t = tokenizer_of(KINDS[kind])
    text = "ab ba abba " * 20_000

    def refuse() -> None:
        with pytest.raises(ContextFullError):
            t.encode(text, most=1000)

    assert fastest(refuse) < fastest(lambda: t.encode(text)) / 4


def fastest(call: Callable[[], object]) -> float:
    """Seconds of this thread's processor time, of several calls."""

    def once() -> float:
        begin = time.thread_time()
        call()
        return time.thread_time() - begin

    return min(once() for _ in range(5))
