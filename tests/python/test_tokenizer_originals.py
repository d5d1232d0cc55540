"""Tokens equal those of Hugging Face's tokenizers, sentencepiece and llama.cpp."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as HuggingFace
from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer

from h2o_cpp._core import Detokenizer
from h2o_cpp.model.tokenizer import Tokenizer
from support.original_tokenizers import CUTS, Original, check, check_bytes, original
from support.random_search import NEW_EXAMPLES, examples
from support.scripted_opt import VISIBLE
from support.vocabularies import (
    TEXTS,
    any_text,
    byte_pairs,
    from_sentencepiece,
    from_tokenizer_json,
    opt_vocabulary,
    sentence_pieces,
    tokenizer_of,
    tokenizer_of_file,
    vectors_of_llama_cpp,
)
from test_tokenizer import TEXTS as MORE_TEXTS

thorough = settings(
    max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# Characters that Unicode tables decide about, and their neighbors.
hard_text = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(" \t\n\r'sS\u017ftTrevmlLdD0½Ⅷ!$+<|=^~"),
        st.sampled_from("가각ᄀ\u1161\u11a8\u0301\u0323\u0345é\u212b\u0344\U0001d15e"),
    )
)


@dataclass(frozen=True)
class Case:
    """One of our tokenizers and the original."""

    ours: Tokenizer
    ids: Callable[[str], list[int]]  # of the original, without parsing special tokens
    decode: Callable[[list[int]], str]


def hugging_face(path: Path, pre: str) -> Case:
    theirs = HuggingFace.from_file(str(path))
    theirs.encode_special_tokens = True  # as text
    ours = tokenizer_of(from_tokenizer_json(path, pre))
    return Case(ours, lambda t: theirs.encode(t, add_special_tokens=False).ids, theirs.decode)


def sentencepiece(path: Path) -> Case:
    theirs = SentencePieceProcessor(model_file=str(path))
    return Case(tokenizer_of(from_sentencepiece(path)), theirs.encode, theirs.decode)


def opt(shared: Path) -> Case:
    files = [str(shared / "tokenizers" / "opt" / name) for name in ("vocab.json", "merges.txt")]
    theirs = ByteLevelBPETokenizer.from_file(*files)
    return Case(tokenizer_of(opt_vocabulary(shared)), lambda t: theirs.encode(t).ids, theirs.decode)


CASES: dict[str, Callable[[Path], Case]] = {
    "smollm2": lambda p: hugging_face(p / "tokenizers/smollm2/tokenizer.json", "smollm"),
    "gpt-neox": lambda p: hugging_face(p / "tokenizers/gpt-neox/20B_tokenizer.json", "olmo"),
    "opt": opt,
    "llama2": lambda p: sentencepiece(p / "tokenizers/llama2/tokenizer.model"),
    "stories260K": lambda p: sentencepiece(p / "models/stories260K/tokenizer.model"),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, shared: Path) -> Case:
    return CASES[request.param](shared)


@dataclass(frozen=True)
class Pair:
    """One of our tokenizers, and a library's tokenizer with the same metadata."""

    ours: Tokenizer
    theirs: Original


def pair(metadata: dict[str, Any]) -> Pair:
    return Pair(tokenizer_of(metadata), original(metadata))


@pytest.fixture(scope="module", params=["bundled", "gpt-2", "gpt-neox", "llama-spm"])
def file(request: pytest.FixtureRequest, shared: Path, tiny_opt: Path) -> Pair:
    """A GGUF file, with its special tokens and space options."""
    name = request.param
    vocabulary = shared / "tokenizers" / "ggml-vocab" / f"ggml-vocab-{name}.gguf"
    ours, metadata = tokenizer_of_file(tiny_opt if name == "bundled" else vocabulary)
    return Pair(ours, original(metadata))


def merging_vocabulary(pre: str) -> dict[str, Any]:
    """A vocabulary that merges across characters, so its tokens show the pre-tokenizer's splits."""
    border = [VISIBLE[byte] for byte in b"as1!' \n"]
    pairs = dict.fromkeys((a, b) for x in border for y in VISIBLE for a, b in ((x, y), (y, x)))
    tokens = [a + b for a, b in pairs if a + b != "ab"]
    extra = [("<u>", 4), ("e\u0301", 4), ("<|end|>", 1)]
    metadata = byte_pairs(*((token, 1) for token in tokens), *extra, pre=pre, bos_token_id=256)
    return metadata | {"tokenizer.ggml.merges": [f"{a} {b}" for a, b in pairs]}


@pytest.fixture(scope="module", params=CUTS)
def cut(request: pytest.FixtureRequest) -> Pair:
    return pair(merging_vocabulary(request.param))


class TestPublished:
    @thorough
    @given(st.one_of(any_text, hard_text))
    @example("".join(TEXTS))
    def test_same_tokens(self, case: Case, text: str) -> None:
        assert case.ours.encode(text, add_special=False) == case.ids(text)

    @pytest.mark.parametrize("text", [*TEXTS, *MORE_TEXTS], ids=ascii)
    def test_same_tokens_and_text_of_listed_texts(self, case: Case, text: str) -> None:
        ids = case.ours.encode(text, add_special=False)
        assert ids == case.ids(text)
        assert case.ours.decode(ids) == case.decode(ids)

    def test_texts_of_llama_cpp(self, case: Case, shared: Path) -> None:
        for text, _ in vectors_of_llama_cpp(shared, "gpt-2")[1]:
            assert case.ours.encode(text, add_special=False) == case.ids(text), text

    @pytest.mark.parametrize(
        "name", ["wiki.test.raw", "l-frank-baum_the-wonderful-wizard-of-oz.txt"]
    )
    def test_long_texts(self, case: Case, shared: Path, name: str) -> None:
        text = (shared / "text" / name).read_text(encoding="utf-8")[:100_000]
        assert case.ours.encode(text, add_special=False) == case.ids(text)

    @thorough
    @given(any_text)
    def test_streamed_text_equals_decoded_text(self, case: Case, text: str) -> None:
        ids = case.ours.encode(text)
        pieces, out, begins = Detokenizer(), [], True
        for token in ids:
            out.append(pieces.push(case.ours.token_bytes(token, begins=begins)))
            begins = begins and not case.ours.has_text([token])
        assert "".join([*out, pieces.finish()]) == case.ours.decode(ids)

    @thorough
    @given(any_text)
    def test_text_never_becomes_a_special_token(self, case: Case, text: str) -> None:
        ids = case.ours.encode(text, add_special=False)
        assert {i for i in ids if not case.ours.token_bytes(i)} == set()


class TestFiles:
    @thorough
    @given(st.one_of(any_text, hard_text))
    @example("".join(TEXTS))
    def test_same_tokens(self, file: Pair, text: str) -> None:
        check(file.ours, file.theirs, text)

    @pytest.mark.parametrize("text", [*TEXTS, *MORE_TEXTS], ids=ascii)
    def test_same_tokens_and_text_of_listed_texts(self, file: Pair, text: str) -> None:
        check(file.ours, file.theirs, text)
        ids = file.ours.encode(text, add_special=False)
        assert file.ours.decode(ids) == file.theirs.library.decode(ids)

    def test_same_bytes(self, file: Pair) -> None:
        check_bytes(file.ours, file.theirs)

    def test_texts_of_llama_cpp(self, file: Pair, shared: Path) -> None:
        for text, _ in vectors_of_llama_cpp(shared, "gpt-2")[1]:
            check(file.ours, file.theirs, text)

    @pytest.mark.parametrize(
        "name", ["wiki.test.raw", "l-frank-baum_the-wonderful-wizard-of-oz.txt"]
    )
    def test_long_texts(self, file: Pair, shared: Path, name: str) -> None:
        text = (shared / "text" / name).read_text(encoding="utf-8")[:100_000]
        assert file.ours.encode(text) == file.theirs.encode(text)

    @thorough
    @given(any_text)
    @example("".join(TEXTS))
    def test_gpt_neox_without_a_pre_tokenizer(self, neox: Case, text: str) -> None:
        """For a file without tokenizer.ggml.pre, the architecture decides."""
        assert neox.ours.encode(text) == neox.ids(text)


@pytest.fixture(scope="module")
def neox(shared: Path) -> Case:
    path = shared / "tokenizers" / "ggml-vocab" / "ggml-vocab-gpt-neox.gguf"
    ours, metadata = tokenizer_of_file(path)
    assert "tokenizer.ggml.pre" not in metadata
    published = CASES["gpt-neox"](shared)
    return Case(ours, published.ids, published.decode)


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm"])
def test_vectors_of_llama_cpp(shared: Path, name: str) -> None:
    tokenizer, vectors = vectors_of_llama_cpp(shared, name)
    for text, expected in vectors:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == expected, text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("letter", ["a", "é"])  # é itself has no piece
def test_long_pieces(letter: str) -> None:
    """Pieces longer in bytes than those in the table of pairs."""
    both = pair(sentence_pieces(*((letter * 2**i, 1) for i in range(1, 8))))
    for n in (*range(1, 40), 63, 64, 65, 127, 128, 129, 300):
        check(both.ours, both.theirs, letter * n)
        check(both.ours, both.theirs, f"ab {letter * n}b")


class TestPreTokenizers:
    @thorough
    @given(st.one_of(any_text, hard_text))
    @example("1²34567 12 1234!!\n\n  x '\u017f 'S a'LL é<u>e\u0301<|end|>")
    def test_same_tokens(self, cut: Pair, text: str) -> None:
        check(cut.ours, cut.theirs, text)

    def test_error_lists_every_name(self) -> None:
        with pytest.raises(ValueError, match="nonsense") as error:
            tokenizer_of(byte_pairs(pre="nonsense"))
        _, names = str(error.value).split("supported: ")
        assert sorted(names.split(", ")) == sorted(CUTS)


@pytest.mark.parametrize("pre", ["default", "gpt-4o", "kimi-k2", "deepseek-v3", "deepseek-llm"])
def test_every_character(pre: str) -> None:
    """All assigned ones; a newer library may assign more. These depend on every class."""
    both = pair(merging_vocabulary(pre))
    categories = [unicodedata.category(chr(c)) for c in range(0x110000)]
    # By default the ends of each run of one category, and every eighth character.
    assigned = [
        chr(c)
        for c, category in enumerate(categories)
        if category not in ("Cs", "Cn", "Co")
        and (NEW_EXAMPLES or c % 8 == 0 or {category} != {*categories[c - 1 : c + 2]})
    ]
    for begin in range(0, len(assigned), 2048):
        # Letters, numbers, spaces and other characters are split differently.
        text = "".join(f"  {c}a 1{c}1 {c}!" for c in assigned[begin : begin + 2048])
        assert both.ours.encode(text) == both.theirs.encode(text)


def test_nfc_of_every_composition() -> None:
    both = pair(byte_pairs(pre="qwen2"))
    marks = [chr(c) for c in range(0x110000) if unicodedata.combining(chr(c))]
    text = "".join(
        unicodedata.normalize(form, chr(c)) + mark
        for form in ("NFD", "NFC")
        for i, c in enumerate(range(0xC0, 0x30000))
        if not 0xD800 <= c < 0xE000 and (unicodedata.decomposition(chr(c)) or i % 64 == 0)
        for mark in ("", marks[i % len(marks)] + marks[i * 7 % len(marks)])
    )
    assert both.ours.encode(text) == both.theirs.encode(text)
