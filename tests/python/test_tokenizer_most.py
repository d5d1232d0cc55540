"""Tokenizer.encode(most=n) rejects exactly the texts with more than n tokens, and early."""

from __future__ import annotations

import random
import resource
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
    """No byte tokens: each run of other characters is one unknown token."""
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
KINDS["word pieces"] = {
    "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.tokens": ["[UNK]", "[CLS]", "[SEP]", "▁a", "▁ab", "b", "ba", "▁ba", "e"],
    "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1, 1],
    **{f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(["unknown", "cls", "eos"])},
    "tokenizer.ggml.seperator_token_id": 2,
}


def unigram(*more: str) -> dict[str, Any]:
    """Scores whose sums are exact."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "▁a", "a", "b", "▁ab", "ba", "éa", *more]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (len(tokens) - 3)],
        "tokenizer.ggml.scores": [-float(i) for i in range(10)] + [-1.0] * len(more),
        "tokenizer.ggml.unknown_token_id": 0,
    }


KINDS["unigram"] = unigram()
KINDS["unigram whole"] = unigram("▁q▁q")  # which crosses spaces: texts are not divided


@pytest.mark.parametrize("kind", KINDS)
def test_most_is_exact(kind: str) -> None:
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


def test_most_in_encode_parts() -> None:
    t = tokenizer_of(byte_pairs())
    parts: list[int | str] = [256, "abc", 256, "d"]
    assert t.encode_parts(parts, most=5) == [256, 257, 99, 256, 100]
    for most in range(5):
        with pytest.raises(ContextFullError):
            t.encode_parts(parts, most=most)


@pytest.mark.parametrize("kind", ["bytes", "composed", "pieces", "word pieces", "unigram"])
def test_long_texts_are_rejected_early(kind: str) -> None:
    """CPU time of rejecting a text, compared with tokenizing it."""
    t = tokenizer_of(KINDS[kind])
    text = "ab ba abba " * 20_000

    def reject() -> None:
        with pytest.raises(ContextFullError):
            t.encode(text, most=1000)

    assert min_seconds(reject) < min_seconds(lambda: t.encode(text)) / 4


@pytest.mark.parametrize("kind", ["word pieces", "unigram"])
def test_refusals_take_little_memory(kind: str) -> None:
    """Little of a text of 7 MiB is normalized or has scores."""
    t = tokenizer_of(KINDS[kind])
    text = "ab éa " * (1 << 20)
    text.encode()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ContextFullError):
        t.encode(text, most=8)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


@pytest.mark.parametrize("one_space", [True, False])
def test_parts_of_long_texts_are_as_the_whole(one_space: bool) -> None:
    key = "tokenizer.ggml.remove_extra_whitespaces"
    parts, whole = (
        tokenizer_of({**KINDS[k], key: one_space}) for k in ("unigram", "unigram whole")
    )
    rng = random.Random(0)
    for n in (4000, 4096, 9000, 30_000):
        for letters in ("ab ", "aéb  ▁", "xyz ab", "▁ "):
            text = "".join(rng.choices(letters, k=n)) + rng.choice(["", " ", "▁ ▁  "])
            assert parts.encode(text) == whole.encode(text)
    texts = ["a" * 20_000, "x" * 5000 + " " + "y" * 5000, " " * 20_000, "ab" + " " * 9000 + "x"]
    for text in texts:
        assert parts.encode(text) == whole.encode(text)


def min_seconds(call: Callable[[], object]) -> float:
    """The minimum CPU time of this thread over several calls, in seconds."""

    def once() -> float:
        begin = time.thread_time()
        call()
        return time.thread_time() - begin

    return min(once() for _ in range(5))
