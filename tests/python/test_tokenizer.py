"""Tokenization: text round-trips; tokens equal those of Hugging Face and llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from h2o_cpp import Generator
from support.needs import packages
from support.random_search import examples
from support.vocabularies import sentence_pieces, tokenizer_of, vectors_of_llama_cpp

TEXTS = [
    "",
    "Hello world",
    "  leading, trailing and   inner spaces  ",
    "tabs\tand\nnew\r\nlines\n\n\n",
    "I'll, you've, he's, don't, WE'RE, 'tis",
    "'sit 'tree 'really 'very 'mine 'llama 'dog, he'd she'd",
    "0 12 345 6789 3.14159",
    "Führer, naïve café, e\u0301 beside \u00e9, ﬁ ligature",
    "нещо на Български; Ελληνικά; עברית; العربية",
    "我想在apple工作1314151天 日本語のテキスト 한국어",
    "កាន់តែពិសេស हिन्दी ไทย",
    "🦙 😶‍🌫️ 👩‍👩‍👧‍👦 🇩🇪 \U0010ffff",
    "\x00\x01\x7f \u00a0 \u200b \u2028 \u3000 \ufeff \ufffd",
    "<s < /s> <|endoftext|> <mask> [PAD3] Ġ Ċ",
]
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "</s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
}

any_text = st.one_of(
    st.text(),
    st.text("aeinorst '\n\t.0é我🦙\u0301\u3000"),
    st.lists(st.sampled_from(TEXTS)).map("".join),
)


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Generator:
    return Generator(tiny_opt, threads=1)


@pytest.fixture(scope="module")
def hugging_face(shared: Path) -> Any:
    """The transformers tokenizer of the bundled model's checkpoint."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(shared / "models" / "tiny-opt-hf")


def change(**changes: Any) -> dict[str, Any]:
    """METADATA with changed tokenizer.ggml.* keys; None removes a key."""
    metadata = METADATA | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


@settings(max_examples=examples(100))
@given(any_text)
def test_random_text_round_trips(generator: Generator, text: str) -> None:
    tokens = generator.tokenize(text, add_special=False)
    assert all(0 <= token < 4096 for token in tokens)
    assert generator.detokenize(tokens) == text


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips(generator: Generator, text: str) -> None:
    tokens = generator.tokenize(text, add_special=False)
    assert generator.detokenize(tokens) == text
    assert generator.tokenize(text) == [2, *tokens]  # </s> in front
    assert generator.detokenize([2, *tokens]) == text


def test_incomplete_utf8_becomes_replacement_characters(generator: Generator) -> None:
    tokens = generator.tokenize("🦙", add_special=False)
    assert len(tokens) > 1
    assert generator.detokenize(tokens[:-1]) == "\ufffd"
    assert generator.detokenize(tokens[-1:]).strip("\ufffd") == ""
    assert generator.detokenize([]) == ""


@packages("transformers")
@settings(max_examples=examples(100))
@given(any_text)
@example("".join(TEXTS))
@example("<s>a</s> <pad><unk>")
def test_same_tokens_as_hugging_face(generator: Generator, hugging_face: Any, text: str) -> None:
    assert generator.tokenize(text) == hugging_face(text, split_special_tokens=True)["input_ids"]


@packages("transformers")
@pytest.mark.parametrize("token", ["</s>", "<pad>"])
def test_parse_special_equals_hugging_face(
    generator: Generator, hugging_face: Any, token: str
) -> None:
    """Parsing them is the default in Hugging Face, but not here."""
    for pattern in ("{}", "a{}b", " {} ", "\n{}{}!", "<{}>", "{} {}"):
        text = pattern.replace("{}", token)
        assert generator.tokenize(text, parse_special=True) == hugging_face(text)["input_ids"], text
        assert generator.detokenize(generator.tokenize(text)) == text


def test_control_tokens_have_no_text(generator: Generator) -> None:
    tokens = generator.tokenize("a</s>b", parse_special=True)
    assert tokens[::2] == [2, 2]
    assert generator.detokenize(tokens) == "ab"
    assert generator.generate("a</s>b", max_tokens=1).prompt_tokens > len(tokens)
    assert generator.generate("a</s>b", max_tokens=1, parse_special=True).prompt_tokens == 4


@packages("transformers")
def test_long_texts_equal_hugging_face(
    generator: Generator, hugging_face: Any, shared: Path
) -> None:
    for name in ("wiki.test.raw", "l-frank-baum_the-wonderful-wizard-of-oz.txt"):
        text = (shared / "text" / name).read_text(encoding="utf-8")[:100_000]
        assert generator.tokenize(text) == hugging_face(text)["input_ids"]


def test_reference_vectors_of_llama_cpp(shared: Path) -> None:
    tokenizer, vectors = vectors_of_llama_cpp(shared, "gpt-2")
    for text, expected in vectors:
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"], ids=ascii)
def test_lone_surrogates_are_rejected(generator: Generator, text: str) -> None:
    with pytest.raises(ValueError, match="Unicode"):
        generator.tokenize(text)
    with pytest.raises(ValueError, match="Unicode"):
        generator.generate(text, max_tokens=1)


@pytest.mark.parametrize("token", [-1, 4096, 2**31, 2**64])
def test_tokens_out_of_range(generator: Generator, token: int) -> None:
    with pytest.raises(ValueError, match=f"token {token} is not in the vocabulary of 4096"):
        generator.detokenize([5, token])


def test_numpy_integers_and_iterables_are_accepted(generator: Generator) -> None:
    tokenizer = generator.tokenizer
    tokens = tokenizer.encode("Hello world")
    assert tokenizer.decode(np.array(tokens)) == tokenizer.decode(iter(tokens)) == "Hello world"
    assert tokenizer.token_bytes(np.int32(tokens[1])) == tokenizer.token_bytes(tokens[1])
    assert not tokenizer.has_text(tokens[:1])
    assert tokenizer.has_text(np.array(tokens))


@pytest.mark.parametrize("token", [-1, 4096, 2**31, -(2**64)])
def test_every_method_rejects_tokens_out_of_range(generator: Generator, token: int) -> None:
    t = generator.tokenizer
    calls: list[Callable[[], object]] = [
        lambda: t.decode([5, token]),
        lambda: t.has_text([token]),
        lambda: t.token_bytes(token),
        lambda: t.token_text(token),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"token {token} is not in the vocabulary of 4096"):
            call()


@pytest.mark.parametrize("text", [5, None, b"a", ["a"]])
def test_text_must_be_str(generator: Generator, text: Any) -> None:
    with pytest.raises(ValueError, match=r"text=.*, expected a str"):
        generator.tokenize(text)


@pytest.mark.parametrize("tokens", [["a"], [1.0], [None]])
def test_tokens_must_be_integers(generator: Generator, tokens: Any) -> None:
    with pytest.raises(TypeError):
        generator.tokenizer.decode(tokens)


def test_bos_token() -> None:
    assert tokenizer_of(METADATA).encode("ab") == [2]
    for add in (True, False):
        tokenizer = tokenizer_of(change(bos_token_id=3, add_bos_token=add))
        assert tokenizer.encode("ab") == [3, 2] if add else [2]
        assert tokenizer.encode("ab", add_special=False) == [2]
        assert tokenizer.encode("") == ([3] if add else [])


def test_end_tokens() -> None:
    assert tokenizer_of(METADATA).end_tokens == frozenset()
    assert tokenizer_of(change(eos_token_id=3)).end_tokens == {3}
    assert tokenizer_of(change(eos_token_id=3, eot_token_id=1)).end_tokens == {1, 3}


def test_special_tokens_of_phi_3_include_the_white_space_after_them() -> None:
    """Hugging Face's rstrip: all of <|user|>, <|end|>, ..., but not of <s> and <|endoftext|>."""
    special = {"<|user|>": 265, "<|end|>": 266, "<|endoftext|>": 267}
    metadata = sentence_pieces(*((text, 3) for text in special))
    text = "<|user|>\n\u3000 a b\n<|end|> \n<|user|>\n"
    a_b, line = [264, 259, 261], 3 + ord("\n")
    ours = tokenizer_of(metadata | {"general.architecture": "phi3"})
    options = {"add_special": False, "parse_special": True}
    assert ours.encode(text, **options) == [265, *a_b, line, 266, 265]
    assert ours.split_special(text) == [265, "a b\n", 266, 265]
    assert ours.encode("<s>\n<|endoftext|>\n", **options) == [1, 259, line, 267, 259, line]
    assert ours.encode("\n a", add_special=False) == [259, line, 264]
    other = tokenizer_of(metadata | {"general.architecture": "llama"})
    assert other.split_special("<|user|>\na") == [265, "\na"]


@pytest.mark.parametrize("kind", [2, 3, 5])
def test_text_never_becomes_a_token_without_text(kind: int) -> None:
    metadata = change(tokens=["a", "b", "ab", "c"], token_type=[1, 1, 1, kind])
    assert tokenizer_of(metadata).encode("cabc") == [2]


@pytest.mark.parametrize("kind", [2, 3, 5])
def test_merges_of_tokens_without_text_have_no_effect(kind: int) -> None:
    """Such as of <mask>, which a checkpoint lists as special but its merges also make."""
    tokens, merges = ["a", "b", "ab", "abab"], ["a b", "ab ab"]
    for silent, expected in ((None, [3]), ("abab", [2, 2]), ("ab", [0, 1, 0, 1]), ("b", [0, 0])):
        types = [kind if token == silent else 1 for token in tokens]
        t = tokenizer_of(change(tokens=tokens, token_type=types, merges=merges))
        assert t.encode("abab") == expected


@pytest.mark.parametrize(
    ("kind", "data"), [(1, b" \xc3b"), (2, b""), (3, b""), (4, "Ġ\xc3b".encode()), (5, b"")]
)
def test_bytes_of_token_types(kind: int, data: bytes) -> None:
    """Normal tokens are in GPT-2's byte encoding, user-defined ones are text, others are empty."""
    metadata = change(tokens=["a", "b", "ab", "Ġ\xc3b"], token_type=[1, 1, 1, kind])
    assert tokenizer_of(metadata).token_bytes(3) == data


def test_token_types_may_be_missing() -> None:
    assert tokenizer_of(change(token_type=None)).token_bytes(3) == b"</s>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "tokenizer.ggml.model': missing, expected a string"),
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv', supported: 'gpt2'"),
        ({"model": 2}, "tokenizer.ggml.model': i64, expected a string"),
        ({"pre": "jais-2"}, "tokenizer.ggml.pre is 'jais-2', supported: "),
        ({"tokens": None}, "tokenizer.ggml.tokens': missing, expected an array of strings"),
        ({"tokens": "abcd"}, "tokenizer.ggml.tokens': string, expected an array of strings"),
        ({"tokens": ["a", "b", "ab"]}, "tokenizer.ggml.tokens has 3 entries"),
        ({"tokens": [1, 2, 3, 4]}, "tokenizer.ggml.tokens"),
        ({"tokens": [["a"], ["b"], ["ab"], ["c"]]}, "tokenizer.ggml.tokens"),
        ({"tokens": ["a", "\udcff", "ab", "</s>"]}, "tokenizer.ggml"),
        ({"token_type": [1, 1, 1]}, "token_type 3, the model has 4"),
        ({"token_type": [1, 1, 1, 7]}, "tokenizer.ggml.token_type has 7"),
        ({"token_type": 1}, "tokenizer.ggml.token_type': i64, expected an array of integers"),
        ({"merges": None}, "tokenizer.ggml.merges': missing, expected an array of strings"),
        ({"merges": "a b"}, "tokenizer.ggml.merges': string, expected an array of strings"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges has 'ab', expected two parts"),
        ({"merges": [" b"]}, "tokenizer.ggml.merges has ' b', expected two parts"),
        ({"merges": ["a "]}, "tokenizer.ggml.merges has 'a ', expected two parts"),
        ({"merges": [""]}, "tokenizer.ggml.merges has '', expected two parts"),
        ({"merges": ["a b c"]}, "tokenizer.ggml.merges"),
        ({"merges": ["a x"]}, "tokenizer.ggml.merges"),
        ({"merges": ["b a"]}, "tokenizer.ggml.merges"),
        ({"merges": ["ab </s>"]}, "tokenizer.ggml.merges"),  # ab</s> is not a token
        ({"merges": ["ab ab"]}, "tokenizer.ggml.merges"),  # longer than any token
        ({"merges": ["a \udcff"]}, "tokenizer.ggml.merges"),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges"),
        ({"merges": [["a", "b"]]}, "tokenizer.ggml.merges"),
        ({"bos_token_id": 4, "add_bos_token": True}, "add_bos_token is true but bos_token_id is "),
        ({"bos_token_id": 2**40}, "tokenizer.ggml.bos_token_id is 1099511627776, the vocabulary"),
        ({"eos_token_id": -1}, "tokenizer.ggml.eos_token_id is -1, the vocabulary has 4"),
        ({"eot_token_id": 2**40}, "tokenizer.ggml.eot_token_id is"),
        ({"eos_token_id": "3"}, "tokenizer.ggml.eos_token_id': string, expected an integer"),
        ({"add_bos_token": True}, "add_bos_token is true but bos_token_id is missing"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token': i64, expected a bool"),
    ],
    ids=ascii,
)
def test_bad_metadata(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is checked below
        tokenizer_of(change(**changes), 4)
    assert message in str(error.value)


def test_vocabulary_size_mismatch() -> None:
    with pytest.raises(ValueError, match="the model has 5"):
        tokenizer_of(METADATA, 5)
