"""The tokenizer of the C API gives the tokens of h2o_cpp.tokenizer, on every text and vocabulary.

Against llama.cpp's vectors, Hugging Face and sentencepiece the Python one is tested, in
test_tokenizer*.py; here the two are compared.
"""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from h2o_cpp import _core
from h2o_cpp.tokenizer import TextTokenizer
from h2o_cpp.tokenizer.pre_tokenizers import _BY_NAME
from support.random_search import examples
from support.scripted_opt import VISIBLE
from support.tokenizer_pair import Pair, pair, pair_of_file, write
from support.vocabularies import (
    TEXTS,
    any_text,
    byte_pairs,
    from_sentencepiece,
    from_tokenizer_json,
    sentence_pieces,
)
from test_tokenizer import TEXTS as MORE_TEXTS

thorough = settings(
    max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# What the tables of Unicode are asked about, and characters near their edges.
hard_text = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(" \t\n\r'sS\u017ftTrevmlLdD0½Ⅷ!$+<|=^~"),
        st.sampled_from("가각ᄀ\u1161\u11a8\u0301\u0323\u0345é\u212b\u0344\U0001d15e"),
    )
)


def opt_metadata(shared: Path) -> dict[str, Any]:
    folder = shared / "tokenizers" / "opt"
    ids: dict[str, int] = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    merges = (folder / "merges.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")[1:]
    tokens = sorted(ids, key=ids.__getitem__)
    special = ("<s>", "<pad>", "</s>", "<unk>")
    return byte_pairs() | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
    }


def published_file(name: str, shared: Path, to: Path) -> Path:
    """A published vocabulary as a GGUF file, which may have to be written."""
    folder = shared / "tokenizers"
    if name == "opt":
        return write(to, opt_metadata(shared))
    if name == "smollm2":
        return write(to, from_tokenizer_json(folder / name / "tokenizer.json", "smollm"))
    if name == "llama2":
        return write(to, from_sentencepiece(folder / name / "tokenizer.model"))
    if name == "stories260K":
        return write(to, from_sentencepiece(shared / "models" / name / "tokenizer.model"))
    return folder / "ggml-vocab" / f"ggml-vocab-{name}.gguf"


@pytest.fixture(scope="module")
def bundled(tiny_opt: Path) -> Pair:
    return pair_of_file(tiny_opt)


@pytest.fixture(
    scope="module",
    params=["gpt-2", "gpt-neox", "llama-spm", "opt", "smollm2", "llama2", "stories260K"],
)
def published(
    request: pytest.FixtureRequest, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    to = tmp_path_factory.mktemp("vocabulary") / "vocabulary.gguf"
    return pair_of_file(published_file(request.param, shared, to))


def showing_cuts(pre: str) -> dict[str, Any]:
    """A vocabulary that merges across characters, so that its tokens show where text was cut."""
    seams = [VISIBLE[byte] for byte in b"as1!' \n"]
    pairs = dict.fromkeys((a, b) for x in seams for y in VISIBLE for a, b in ((x, y), (y, x)))
    tokens = [a + b for a, b in pairs if a + b != "ab"]
    extra = [("<u>", 4), ("e\u0301", 4), ("<|end|>", 1)]
    metadata = byte_pairs(*((token, 1) for token in tokens), *extra, pre=pre, bos_token_id=256)
    return metadata | {"tokenizer.ggml.merges": [f"{a} {b}" for a, b in pairs]}


@pytest.fixture(scope="module", params=_BY_NAME)
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair(tmp_path_factory.mktemp("vocabulary"), showing_cuts(request.param))


class TestBundledModel:
    @thorough
    @given(st.one_of(any_text, hard_text))
    @example("".join(TEXTS))
    def test_same_tokens(self, bundled: Pair, text: str) -> None:
        bundled.check(text)

    @pytest.mark.parametrize("text", [*TEXTS, *MORE_TEXTS], ids=ascii)
    def test_same_tokens_on_the_lists(self, bundled: Pair, text: str) -> None:
        bundled.check(text)

    def test_same_bytes(self, bundled: Pair) -> None:
        bundled.check_tokens()


class TestPublishedVocabularies:
    @thorough
    @given(st.one_of(any_text, hard_text))
    @example("".join(TEXTS))
    def test_same_tokens(self, published: Pair, text: str) -> None:
        published.check(text)

    @pytest.mark.parametrize("text", [*TEXTS, *MORE_TEXTS], ids=ascii)
    def test_same_tokens_on_the_lists(self, published: Pair, text: str) -> None:
        published.check(text)

    def test_same_bytes(self, published: Pair) -> None:
        published.check_tokens()

    def test_vectors_of_llama_cpp(self, published: Pair, shared: Path) -> None:
        path = shared / "tokenizers/ggml-vocab/ggml-vocab-gpt-2.gguf.inp"
        with open(path, encoding="utf-8", newline="") as file:
            for text in file.read().split("\n__ggml_vocab_test__\n"):
                published.check(text)

    @pytest.mark.parametrize(
        "name", ["wiki.test.raw", "l-frank-baum_the-wonderful-wizard-of-oz.txt"]
    )
    def test_long_texts(self, published: Pair, shared: Path, name: str) -> None:
        text = (shared / "text" / name).read_text(encoding="utf-8")[:100_000]
        got = published.core.encode(text, add_special=True, parse_special=False, begins=True)
        assert got == published.python.encode(text)


class TestCuts:
    @thorough
    @given(st.one_of(any_text, hard_text))
    @example("1²34567 12 1234!!\n\n  x '\u017f 'S a'LL é<u>e\u0301<|end|>")
    def test_same_tokens(self, cut: Pair, text: str) -> None:
        cut.check(text)


def test_every_character(tmp_path: Path) -> None:
    """Nearly: those that Unicode has assigned; a newer library may know more of the others."""
    both = pair(tmp_path, showing_cuts("default"))  # which asks for letters, numbers, punctuation
    assigned = [
        chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cs", "Cn", "Co")
    ]
    for begin in range(0, len(assigned), 2048):
        # Between spaces a letter, a number, a space and anything else are cut apart differently.
        text = "".join(f"  {c}a 1{c}1 {c}!" for c in assigned[begin : begin + 2048])
        got = both.core.encode(text, add_special=False, parse_special=False, begins=True)
        assert got == both.python.encode(text, add_special=False)


def test_every_composition(tmp_path: Path) -> None:
    both = pair(tmp_path, byte_pairs(pre="qwen2"))
    marks = [chr(c) for c in range(0x110000) if unicodedata.combining(chr(c))]
    text = "".join(
        unicodedata.normalize(form, chr(c)) + mark
        for form in ("NFD", "NFC")
        for i, c in enumerate(range(0xC0, 0x30000))
        if not 0xD800 <= c < 0xE000 and (unicodedata.decomposition(chr(c)) or i % 64 == 0)
        for mark in ("", marks[i % len(marks)] + marks[i * 7 % len(marks)])
    )
    got = both.core.encode(text, add_special=False, parse_special=False, begins=True)
    assert got == both.python.encode(text, add_special=False)


@pytest.mark.parametrize(
    "metadata",
    [
        byte_pairs(model="bert"),
        byte_pairs(pre="nonsense"),
        byte_pairs(merges=["ab"]),
        byte_pairs(merges=[" b"]),
        byte_pairs(merges=["a "]),
        byte_pairs(merges=["b a"]),
        byte_pairs(merges=["ab </s>"]),
        byte_pairs(token_type=[1, 2, 3]),
        byte_pairs(token_type=[7] * 258),
        byte_pairs(bos_token_id=258),
        byte_pairs(eot_token_id=-1),
        byte_pairs(add_bos_token=True),
        byte_pairs(add_bos_token=1),
        sentence_pieces(scores=[0.0]),
        sentence_pieces(scores=[1] * 265),
        sentence_pieces(tokens=["a"] * 265),
        sentence_pieces(tokens=[""] * 265),
        sentence_pieces(token_type=[6] * 265),
        sentence_pieces(unknown_token_id=265),
        sentence_pieces(add_space_prefix=1),
        sentence_pieces(("<0x0A>", 1), ("ab", 4)),
        sentence_pieces(tokens=["a", "b"], token_type=[1, 1], scores=[0.0, 0.0]),
    ],
    ids=range(22),
)
def test_both_refuse(tmp_path: Path, metadata: dict[str, Any]) -> None:
    file = _core.GgufFile(write(tmp_path / "vocabulary.gguf", metadata))
    n_vocab = len(metadata["tokenizer.ggml.tokens"])
    for make in (
        lambda: TextTokenizer(file.metadata(), n_vocab),
        lambda: _core.Tokenizer(file, n_vocab),
    ):
        with pytest.raises(ValueError, match=r"tokenizer\.ggml"):
            make()


@pytest.mark.parametrize("token", [-1, 4096])
def test_tokens_out_of_range(bundled: Pair, token: int) -> None:
    with pytest.raises(ValueError, match=f"token {token} is not in the vocabulary of 4096"):
        bundled.core.decode([5, token])
