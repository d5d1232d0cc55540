"""The tokens are those of llama.cpp's vectors, Hugging Face's tokenizers and sentencepiece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from sentencepiece import SentencePieceProcessor

from h2o_cpp import _core
from h2o_cpp.generation.text_pieces import TextPieces
from h2o_cpp.tokenizer import TextTokenizer
from support.random_search import examples
from support.vocabularies import (
    TEXTS,
    any_text,
    from_sentencepiece,
    from_tokenizer_json,
    vectors_of_llama_cpp,
)

thorough = settings(
    max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@dataclass(frozen=True)
class Case:
    """A tokenizer of ours and the original."""

    ours: TextTokenizer
    ids: Callable[[str], list[int]]  # by the original, special tokens not read
    decode: Callable[[list[int]], str]


def hugging_face(path: Path, pre: str) -> Case:
    original = tokenizers.Tokenizer.from_file(str(path))
    original.encode_special_tokens = True  # as text
    metadata = from_tokenizer_json(path, pre)
    return Case(
        TextTokenizer(metadata, len(metadata["tokenizer.ggml.tokens"])),
        lambda text: original.encode(text, add_special_tokens=False).ids,
        original.decode,
    )


def sentencepiece(path: Path) -> Case:
    original = SentencePieceProcessor(model_file=str(path))
    metadata = from_sentencepiece(path)
    return Case(
        TextTokenizer(metadata, len(metadata["tokenizer.ggml.tokens"])),
        original.encode,
        original.decode,
    )


CASES: dict[str, Callable[[Path], Case]] = {
    "smollm2": lambda p: hugging_face(p / "tokenizers/smollm2/tokenizer.json", "smollm"),
    "gpt-neox": lambda p: hugging_face(p / "tokenizers/gpt-neox/20B_tokenizer.json", "olmo"),
    "llama2": lambda p: sentencepiece(p / "tokenizers/llama2/tokenizer.model"),
    "stories260K": lambda p: sentencepiece(p / "models/stories260K/tokenizer.model"),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, shared: Path) -> Case:
    return CASES[request.param](shared)


@pytest.fixture(scope="module")
def neox_file(shared: Path) -> Case:
    metadata = _core.GgufFile(
        shared / "tokenizers" / "ggml-vocab" / "ggml-vocab-gpt-neox.gguf"
    ).metadata()
    assert "tokenizer.ggml.pre" not in metadata
    tokenizer = TextTokenizer(metadata, len(metadata["tokenizer.ggml.tokens"]))
    return replace(CASES["gpt-neox"](shared), ours=tokenizer)


@thorough
@given(any_text)
@example("".join(TEXTS))
def test_same_tokens_as_the_original(case: Case, text: str) -> None:
    assert case.ours.encode(text, add_special=False) == case.ids(text)


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_same_tokens_and_text_on_the_list(case: Case, text: str) -> None:
    ids = case.ours.encode(text, add_special=False)
    assert ids == case.ids(text)
    assert case.ours.decode(ids) == case.decode(ids)


def test_a_book(case: Case, shared: Path) -> None:
    path = shared / "text" / "l-frank-baum_the-wonderful-wizard-of-oz.txt"
    text = path.read_text(encoding="utf-8")[:50_000]
    assert case.ours.encode(text, add_special=False) == case.ids(text)


@thorough
@given(any_text)
def test_streamed_text_is_the_whole_text(case: Case, text: str) -> None:
    ids = case.ours.encode(text)
    pieces, out, begins = TextPieces([]), [], True
    for token in ids:
        out.append(pieces.push(case.ours.token_bytes(token, begins=begins)))
        begins = begins and not case.ours.has_text([token])
    assert "".join([*out, pieces.finish()]) == case.ours.decode(ids)


@thorough
@given(any_text)
def test_no_text_becomes_a_special_token(case: Case, text: str) -> None:
    ids = case.ours.encode(text, add_special=False)
    silent = {i for i in ids if not case.ours.token_bytes(i)}
    assert silent == set()


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm"])
def test_vectors_of_llama_cpp(shared: Path, name: str) -> None:
    tokenizer, vectors = vectors_of_llama_cpp(shared, name)
    for text, expected in vectors:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == expected, text
        assert tokenizer.decode(ids) == text


@thorough
@given(any_text)
@example("".join(TEXTS))
def test_gpt_neox_file_without_a_pre_tokenizer(neox_file: Case, text: str) -> None:
    """From before the key: the architecture tells."""
    assert neox_file.ours.encode(text) == neox_file.ids(text)
