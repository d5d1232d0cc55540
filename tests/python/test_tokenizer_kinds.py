"""Tokenizers from metadata only: pre-tokenization, spaces, bytes, special tokens, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_cpp.model.special_escape import SpecialTokenEscape, unused_characters
from support.scripted_opt import VISIBLE
from support.vocabularies import TEXTS, any_text, byte_pairs, sentence_pieces
from support.vocabularies import tokenizer_of as tokenizer

S = "\u2581"
WITH_PREFIX, WITHOUT_PREFIX = (
    tokenizer(sentence_pieces(add_space_prefix=prefix)) for prefix in (True, False)
)


def text_bytes(text: str) -> list[int]:
    """The byte tokens of sentence_pieces() for text without pieces."""
    return [3 + byte for byte in text.encode()]


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", "I|'|LL| we|'ll| 12345½| | x|\n\n\t| y|!!|\n  "),
        ("llama-bpe", "I|'LL| we|'ll| |123|45½| | x|\n\n|\t| y|!!\n|  "),
        ("gpt-4o", "I'LL| we'll| |123|45½| | x|\n\n|\t| y|!!\n|  "),
        ("kimi-k2", "I'LL| we'll|漢字々|ab한|漢|X|漢| |123|45½| | x|\n\n|\t| y|!!\n|/|  "),
        ("tekken", "I|'LL| we|'ll| |1|2|3|4|5|½| | x|\n\n|\t| y|!!\n|  "),
        ("dbrx", "I|'LL| we|'ll| |123|45½| | x|\n\n|\t| y|!!\n|  "),
        ("seed-coder", "I|'LL| we|'ll| |1|2|3|4|5|½| | x|\n\n|\t| y|!!|\n|  "),
        ("minicpm5", "I|'LL| we|'ll| |123|45½| | x|\n\n|\t| y|!!\n|  "),
        ("deepseek-v3", "I|'LL| we|'ll| |123|45½| | x|\n\n|\t| y|!!\n|  "),
        ("deepseek-coder", "I|'|LL| we|'|ll| |1|2|3|4|5|½| | x|\n|\n|\t| y|!!|\n|  "),
        ("deepseek-llm", "I|'|LL| we|'|ll| |1|2|3|4|5|½| | x|\n|\n|\t| y|!!|\n|  "),
        ("exaone-moe", "I|'LL| we|'ll| |1|2|3|4|5|½| | x|\n\n|\t| y|!!\n|  "),
        ("viking", "I'LL| we'll| \n\n\t| |1|2|3|4|5|½| ,| x|!!\n  "),
        ("stablelm2", "I|'LL| we|'ll| |1|2|3|4|5|½| | x|\n\n|\t| y|!!\n|  "),
        ("bloom", "I'LL| we'll| \n\n\t| 12345½| ,| x|!!\n  "),
        ("falcon", "I|'|LL| we|'|ll| |123|45½| x|\n\n\t| y|!!|\n  "),
        ("qwen2", "I|'LL| we|'ll| |1|2|3|4|5|½| | x|\n\n|\t| y|!!\n|  "),
        ("qwen35", "I|'LL| we|'ll| |1|2|3|4|5|½| | x|\n\n|\t| y|!!\n|  "),
        ("qwen35", "q\u0301q|!!|\u0301q|\n|\u0301\u0301| |1|\u0301|1"),
        ("qwen2", "q|\u0301q|!!\u0301|q|\n|\u0301\u0301| |1|\u0301|1"),
        ("command-r", "I|'|LL| we|'ll| |1|2|3|4|5|½| | x|\n\n\t| y|!!|\n  "),
        ("smollm", "I|'|LL| we|'ll| |1|2|3|4|5|½| | x|\n\n\t| y|!!|\n  "),
        ("default", "I|'|LL| we|'|ll| |123|45½| | x|\n\n\t| y|!!|\n  "),
    ],
)
def test_pre_tokenizer_splits(name: str, pieces: str) -> None:
    text = pieces.replace("|", "")
    visible = "".join(VISIBLE[byte] for byte in text.encode())
    n = len(visible)
    # Every part of the text is a token and every pair a merge, so only the pre-tokenizer splits.
    parts = dict.fromkeys(visible[i:j] for i in range(n) for j in range(i + 2, n + 1))
    merges = [f"{part[:i]} {part[i:]}" for part in parts for i in range(1, len(part))]
    extra = [(part, 1) for part in parts]
    t = tokenizer(byte_pairs(*extra, pre=name, merges=merges, add_bos_token=False))
    tokens = t.encode(text, add_special=False)
    assert "|".join(t.decode([token]) for token in tokens) == pieces


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("llama3", "llama-bpe"),
        ("pixtral", "llama-bpe"),
        ("falcon3", "llama-bpe"),
        ("smaug-bpe", "dbrx"),
        ("deepseek-r1-qwen", "qwen2"),
        ("mpt", "olmo"),
        ("phi-2", "gpt-2"),
        ("starcoder", "smollm"),
        ("refact", "smollm"),
        ("exaone", "smollm"),
        ("minerva-7b", "smollm"),
        ("exaone4", "gpt-2"),
        ("glm5", "glm4"),
        ("f2llmv2", "qwen2"),
        ("cohere2moe", "tiny_aya"),
        ("chatglm-bpe", "dbrx"),
        ("hunyuan", "qwen2"),
        ("bailingmoe2", "stablelm2"),
        ("hunyuan-dense", "deepseek-v3"),
        ("minimax-m2", "gpt-4o"),
        ("midm-2.0", "llama-bpe"),
        ("lfm2", "llama-bpe"),
    ],
)
def test_aliases(alias: str, name: str) -> None:
    extra = [("12", 1), ("'L", 1), ("'LL", 1), ("\u0120ab", 1)]
    merges = ["a b", "1 2", "' L", "'L L", "\u0120 ab"]
    for text in ("ab ab", "12", "I'LL", "e\u0301"):
        one, other = (
            tokenizer(byte_pairs(*extra, pre=pre, merges=merges, add_bos_token=False))
            for pre in (alias, name)
        )
        assert one.encode(text) == other.encode(text)


@pytest.mark.parametrize("pre", ["llama-bpe", "glm4", "glm5"])
def test_whole_tokens_are_preferred_to_merges(pre: str) -> None:
    extra = ("abc", 1)  # no merge produces it
    assert tokenizer(byte_pairs(extra)).encode("abc") == [257, ord("c")]
    assert tokenizer(byte_pairs(extra, pre=pre, add_bos_token=False)).encode("abc") == [258]


@pytest.mark.parametrize("pre", ["olmo", "mpt", "qwen2", "qwen35"])
def test_nfc_normalization(pre: str) -> None:
    assert tokenizer(byte_pairs(pre=pre)).encode("e\u0301") == [0xC3, 0xA9]
    assert tokenizer(byte_pairs()).encode("e\u0301") == [ord("e"), 0xCC, 0x81]


@pytest.mark.parametrize("pre", ["nonsense", "GPT-2", " ", "llama"])
def test_unknown_pre_tokenizers_are_rejected(pre: str) -> None:
    with pytest.raises(ValueError, match=f"tokenizer.ggml.pre is '{pre}', supported: default, "):
        tokenizer(byte_pairs(pre=pre))


@pytest.mark.parametrize(
    ("architecture", "e"), [("gpt2", [101, 0xCC, 0x81]), ("gptneox", [0xC3, 0xA9])]
)
def test_pre_tokenizers_of_files_without_the_key(architecture: str, e: list[int]) -> None:
    metadata = byte_pairs()
    del metadata["tokenizer.ggml.pre"]
    assert tokenizer(metadata | {"general.architecture": architecture}).encode("e\u0301") == e
    text = "it's 1234 x !?"
    llama, empty, default = (
        tokenizer(known | {"general.architecture": "llama"})
        for known in (metadata, byte_pairs(pre=""), byte_pairs(pre="default"))
    )
    for one in (llama, empty):
        assert one.encode(text) == default.encode(text)
        assert [w.partition(":")[0] for w in one.core.warnings] == ["tokenizer.ggml.pre is missing"]
    assert not default.core.warnings


def test_merges_with_spaces() -> None:
    assert tokenizer(byte_pairs((" ", 1), (" a", 1), merges=["  a"])).encode("a") == [97]
    with pytest.raises(ValueError, match="has '  ', expected two parts and a space"):
        tokenizer(byte_pairs((" ", 1), merges=["  "]))


class TestSentencePieces:
    def test_add_space_prefix(self) -> None:
        t = tokenizer(sentence_pieces())
        assert t.encode("ab ab", add_special=False) == [263, 263]
        assert t.encode(" ab", add_special=False) == [259, 263]
        assert t.encode("") == [1]
        assert t.encode("", add_special=False) == []
        t = tokenizer(sentence_pieces(add_space_prefix=False))
        assert t.encode("ab ab", add_special=False) == [262, 263]

    def test_byte_fallback(self) -> None:
        t = tokenizer(sentence_pieces())
        assert t.encode("a🦙", add_special=False) == [264, *text_bytes("🦙")]
        assert [t.token_bytes(i) for i in text_bytes("é")] == [b"\xc3", b"\xa9"]

    @given(any_text)
    def test_random_text_round_trips(self, text: str) -> None:
        text = text.replace(S, "")  # SentencePiece treats it as a space
        for t in WITH_PREFIX, WITHOUT_PREFIX:
            assert t.decode(t.encode(text)) == text

    def test_token_bytes(self) -> None:
        t = tokenizer(sentence_pieces(("x y", 4), ("u", 5)))
        assert [t.token_bytes(i) for i in (0, 1, 2, 259, 263, 265, 266)] == [
            *[b""] * 3, b" ", b" ab", b"x y", b"",
        ]  # fmt: skip

    def test_decode_removes_only_the_first_space(self) -> None:
        t = tokenizer(sentence_pieces())
        assert t.decode([1, 263, 263]) == "ab ab"
        assert t.decode([259, 263]) == " ab"
        assert t.decode([262, 263]) == "ab ab"
        assert t.token_bytes(263, begins=True) == b"ab"
        assert t.token_bytes(263) == b" ab"
        assert tokenizer(sentence_pieces(add_space_prefix=False)).decode([263]) == " ab"

    def test_user_defined_tokens_are_matched_first(self) -> None:
        """Those with ▁ are pieces; the others divide the text, like special tokens."""
        t = tokenizer(sentence_pieces((f"ba{S}{S}ab", 4)))
        assert t.encode("ba  abb", add_special=False) == [259, 265, 261]
        t = tokenizer(sentence_pieces(("ba  ab", 4)))
        assert t.encode("ba  abb", add_special=False) == [265, 259, 261]

    def test_empty_tokens_are_never_used(self) -> None:
        t = tokenizer(sentence_pieces(("", 1), ("", 4)))
        assert t.encode("ab ab", add_special=False) == [263, 263]
        assert t.token_bytes(265) == b""

    def test_remove_extra_whitespaces(self) -> None:
        t = tokenizer(sentence_pieces(remove_extra_whitespaces=True))
        assert t.encode("  ab   ab ", add_special=False) == [263, 263]

    def test_continued_text_gets_no_space(self) -> None:
        t = tokenizer(sentence_pieces())
        assert t.encode_parts(["ab"], begins=False) == [262]
        assert t.encode_parts([" ab", 2, "ab"], begins=False) == [263, 2, 263]

    @pytest.mark.parametrize("unknown", [0, 1, 259])
    def test_unknown_token(self, unknown: int) -> None:
        """Files may declare none or several of this type."""
        metadata = sentence_pieces(unknown_token_id=unknown)
        for kind in (1, 2, 3):
            metadata["tokenizer.ggml.token_type"][:2] = [kind, kind]
            assert tokenizer(metadata).encode("ab", add_special=False) == [263]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"scores": None}, "tokenizer.ggml.scores is missing"),
            ({"scores": [0.0]}, "tokenizer.ggml.scores has 1 entries, the model has 265"),
            (
                {"scores": [1] * 265},
                "tokenizer.ggml.scores is missing or is not an array of floats",
            ),
            ({"scores": [math.inf] * 265}, "tokenizer.ggml.scores has inf"),
            ({"tokens": ["a"] * 265}, "tokenizer.ggml.tokens has a piece twice"),
            ({"tokens": [""] * 265}, "the byte tokens are not <0x00> to <0xFF>"),
            ({"tokens": ["\udcff"] * 265}, "token 0 is not valid UTF-8"),
            ({"token_type": None}, "tokenizer.ggml.token_type is missing"),
            ({"token_type": [-1] * 265}, "tokenizer.ggml.token_type has -1, expected 1 to 6"),
            ({"unknown_token_id": 265}, "unknown_token_id is 265, the vocabulary has 265"),
            ({"add_space_prefix": 1}, "add_space_prefix': i64, expected a bool"),
            ({"token_type": [6] * 265}, "the byte tokens are not <0x00> to <0xFF>"),
            ({"tokens": ["<0x0A>"] * 2 + ["a"] * 263}, "has a piece twice"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_bad_metadata(self, changes: dict[str, Any], message: str) -> None:
        metadata = sentence_pieces(**changes)
        metadata = {key: value for key, value in metadata.items() if value is not None}
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is checked below
            tokenizer(metadata)
        assert message in str(error.value)


SPECIAL = tokenizer(byte_pairs(("<|x|>", 2), (">", 3)))


class TestSpecialTokens:
    def test_control_tokens_need_parse_special(self) -> None:
        t = tokenizer(byte_pairs(("<x>", 2), ("<y>", 5)))
        assert t.encode("a</s>b<x>", parse_special=True) == [97, 256, 98, 258]
        assert t.decode(t.encode("a</s>b<x><y>")) == "a</s>b<x><y>"
        assert t.encode("<y>", parse_special=True) == [*b"<y>"]  # unused

    def test_user_defined_tokens_are_always_parsed(self) -> None:
        t = tokenizer(byte_pairs(("<x>", 4), ("  ", 4)))
        assert t.encode("a<x>   b") == [97, 258, 259, 32, 98]
        assert t.decode([97, 258, 259, 98]) == "a<x>  b"

    def test_longest_token_wins(self) -> None:
        t = tokenizer(byte_pairs(("</s", 3), ("</s>>", 3)))
        assert t.encode("</s></s>></s", parse_special=True) == [256, 259, 258]

    def test_sentence_pieces_add_a_space_after_special_tokens(self) -> None:
        t = tokenizer(sentence_pieces())
        assert t.encode("ab</s>ab", parse_special=True) == [1, 263, 2, 263]
        assert t.encode("<s>ab", add_special=False, parse_special=True) == [1, 263]
        assert 2 not in t.encode("</s>")
        assert t.decode(t.encode("</s>")) == "</s>"

    @given(st.lists(st.sampled_from(["</s>", "<", "</", "s>", ">", "a", "\U000f0000"])))
    def test_escaped_text_has_no_special_tokens(self, fragments: list[str]) -> None:
        text = "".join(fragments)
        escape = SpecialTokenEscape(SPECIAL.special_texts, unused_characters([text]))
        escaped = escape.escape(text)
        for cut in range(len(escaped) + 1):  # however a template splits it
            for part in SPECIAL.split_special(escaped[cut:] + escaped[:cut]):
                assert isinstance(part, str)
        assert escape.unescape(escaped) == text

    def test_split_special(self) -> None:
        assert SPECIAL.special_texts == ["</s>", "<|x|>", ">"]
        assert SPECIAL.split_special("a</s><|x|>>") == ["a", 256, 258, 259]
        assert SPECIAL.split_special("") == []

    def test_vocabulary_without_special_tokens(self) -> None:
        t = tokenizer(byte_pairs(token_type=[1] * 258))
        assert t.split_special("a</s>") == ["a</s>"]
        assert SpecialTokenEscape(t.special_texts, unused_characters([])).escape("a") == "a"


class TestBosAndEos:
    @pytest.mark.parametrize(
        ("metadata", "ids"),
        [
            (byte_pairs(), [97]),
            (byte_pairs(bos_token_id=256, add_bos_token=True), [256, 97]),
            (byte_pairs(pre="llama-bpe", bos_token_id=256), [256, 97]),
            (byte_pairs(pre="llama3", bos_token_id=256, add_bos_token=False), [97]),
            (byte_pairs(add_eos_token=True), [97, 256]),
            (sentence_pieces(), [1, 264]),
            (sentence_pieces(add_bos_token=False), [264]),
            (sentence_pieces(add_eos_token=True), [1, 264, 2]),
            (sentence_pieces(bos_token_id=2), [2, 264]),
        ],
    )
    def test_bos_and_eos_are_added(self, metadata: dict[str, Any], ids: list[int]) -> None:
        t = tokenizer(metadata)
        assert t.encode("a") == ids
        assert t.encode("a", add_special=False) == [i for i in ids if i in (97, 264)]

    @pytest.mark.parametrize("name", ["bos", "eos"])
    def test_missing_bos_or_eos_id(self, name: str) -> None:
        metadata = byte_pairs() | {f"tokenizer.ggml.add_{name}_token": True}
        del metadata["tokenizer.ggml.eos_token_id"]
        with pytest.raises(ValueError, match=f"{name}_token_id is missing"):
            tokenizer(metadata)

    @pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom"])
    @pytest.mark.parametrize("id", [258, 2**32 - 1])
    def test_tokens_beyond_the_vocabulary_are_ignored(self, name: str, id: int) -> None:
        """Converters of fine-tunes wrote them; llama.cpp ignores them with a warning."""
        metadata = byte_pairs() | {f"tokenizer.ggml.{name}_token_id": id}
        t = tokenizer(metadata)
        assert t.end_tokens == (set() if name == "eos" else {256})
        [warning] = t.core.warnings
        assert f"{name}_token_id is {id}, the vocabulary has 258 tokens" in warning
        if name == "bos":
            assert t.encode("a") == [97]
            assert tokenizer(sentence_pieces(bos_token_id=9999)).encode("a") == [1, 264]
        if name == "eos":
            t = tokenizer(sentence_pieces(eos_token_id=9999))
            assert t.eos == 2
            assert t.end_tokens == {2}

    def test_undefined_tokens_are_unused(self) -> None:
        t = tokenizer(byte_pairs(("<pad>", 0), ("<x>", 0)))
        assert t.encode("<pad>", parse_special=True) == [*b"<pad>"]
        assert t.token_bytes(258) == b""
        assert ["for 2 tokens" in warning for warning in t.core.warnings] == [True]

    def test_end_tokens(self) -> None:
        assert tokenizer(byte_pairs()).end_tokens == {256}
        assert tokenizer(byte_pairs(eot_token_id=5, eom_token_id=6)).end_tokens == {5, 6, 256}
        assert tokenizer(sentence_pieces()).end_tokens == {2}

    @pytest.mark.parametrize("text", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"])
    @pytest.mark.parametrize("kind", [1, 3, 4])
    def test_end_tokens_by_text(self, text: str, kind: int) -> None:
        """They are control tokens whatever type the file gives them."""
        t = tokenizer(byte_pairs((text, kind)))
        assert t.end_tokens == {256, 258}
        assert 258 not in t.encode(text)
        assert t.encode(text, parse_special=True) == [258]
        assert t.token_bytes(258) == b""


@pytest.mark.parametrize("metadata", [byte_pairs(), sentence_pieces()], ids=["gpt2", "llama"])
@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"], ids=ascii)
def test_lone_surrogates_are_rejected(metadata: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="text is not valid Unicode"):
        tokenizer(metadata).encode(text)


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_text_round_trips_with_byte_pairs(text: str) -> None:
    t = tokenizer(byte_pairs())
    assert t.decode(t.encode(text)) == text
