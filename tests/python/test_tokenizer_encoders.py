"""Tokens of encoders equal those of Hugging Face's tokenizers and sentencepiece."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HuggingFace

from h2o_cpp.convert.tokens import read_tokens
from h2o_cpp.convert.vocabulary import read_vocabulary
from h2o_cpp.generation.request import ContextFullError
from h2o_cpp.model.tokenizer import Tokenizer
from support import encoders
from support.needs import packages
from support.opt_checkpoint import write_json
from support.random_search import examples
from support.vocabularies import TEXTS, any_text, tokenizer_of

# ---- WordPiece ----

# Characters that may be letters, marks, signs or controls, each as a piece.
_CHARACTERS = [
    *(chr(c) for c in range(0x21, 0x600)),
    *(chr(c) for c in range(0x1E00, 0x2200)),
    *"각가각\u3042\u304c\u3000東京\U00020000\ua66f\u0e33\u0e31हिन्दीកាន់🦙\U0010ffff\u200b\u00ad",
]
_PIECES = [*encoders.WORD_PIECES[:5], "hello", "##ell", "naive", "naïve", "##ing"]
_PIECES += dict.fromkeys([f"{hashes}{c}" for c in _CHARACTERS for hashes in ("", "##")])

bert_text = st.one_of(
    any_text,
    st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(_CHARACTERS))),
)


def word_pieces(pieces: list[str], **flags: bool) -> Tokenizer:
    """The tokenizer of a GGUF file with llama.cpp's names of keys."""
    special = [piece.startswith("[") and len(piece) > 1 for piece in pieces]
    tokens = [
        piece if is_special else piece[2:] if piece.startswith("##") and piece[2:] else f"▁{piece}"
        for piece, is_special in zip(pieces, special, strict=True)
    ]
    named = ("padding", "unknown", "cls", "seperator", "mask")
    return tokenizer_of(
        {
            "tokenizer.ggml.model": "bert",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if one else 1 for one in special],
            **{f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(named)},
            **{f"tokenizer.ggml.normalizer.{name}": flag for name, flag in flags.items()},
        }
    )


def original_word_pieces(pieces: list[str], lowercase: bool, strip_accents: bool) -> HuggingFace:
    ids = {piece: i for i, piece in enumerate(pieces)}
    original = HuggingFace(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    original.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents
    )
    original.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return original


@pytest.fixture(scope="module", params=[(True, True), (False, False), (True, False)])
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, HuggingFace]:
    lower, strips = request.param
    ours = word_pieces(_PIECES, lowercase=lower, strip_accents=strips)
    return ours, original_word_pieces(_PIECES, lower, strips)


def check(pair: tuple[Tokenizer, HuggingFace], text: str) -> None:
    ours, original = pair
    assert ours.encode(text, add_special=False) == original.encode(text).ids


@pytest.mark.parametrize(
    "text", [*TEXTS, "x" * 100, "x" * 101, "é" * 100, "naïve NAÏVE İstanbul ΣΑΣ ǅ ß ẞ"]
)
def test_word_pieces(pair: tuple[Tokenizer, HuggingFace], text: str) -> None:
    check(pair, text)


@given(text=bert_text)
@settings(max_examples=examples(50))
def test_word_pieces_of_any_text(pair: tuple[Tokenizer, HuggingFace], text: str) -> None:
    check(pair, text)


def test_every_character() -> None:
    """Whether it is a space, removed, a word of its own, changed, or none of these."""
    pair = word_pieces(_PIECES), original_word_pieces(_PIECES, True, True)
    for begin in range(0, 0x110000, 1 << 14):
        codes = [c for c in range(begin, begin + (1 << 14)) if not 0xD800 <= c < 0xE000]
        if begin >= 0x20000:
            codes = codes[::41]
        check(pair, " ".join(f"a{chr(c)}b" for c in codes))


def test_special_tokens_are_around_a_text() -> None:
    ours = word_pieces(encoders.WORD_PIECES)
    [the, old] = (encoders.WORD_PIECES.index(piece) for piece in ("the", "old"))
    assert ours.encode("The OLD") == [2, the, old, 3]
    assert ours.encode("") == [2, 3]
    assert ours.encode("the [SEP]", parse_special=True) == [2, the, 3, 3]
    assert (ours.bos, ours.eos) == (2, 3)
    assert ours.encode_pair("the", "old") == [2, the, 3, old, 3]
    assert ours.decode(ours.encode("the NAÏVE teas xyz")) == "the naive teas"  # and an unknown one


def test_pairs_stop_at_the_first_that_is_too_long() -> None:
    ours = word_pieces(encoders.WORD_PIECES)
    documents = iter(["old", "the " * 5, "sea"])
    pairs = ours.encode_pairs("the", documents, most=7)
    assert next(pairs) == ours.encode_pair("the", "old")
    with pytest.raises(ContextFullError):
        next(pairs)
    assert next(documents) == "sea"
    for query in ("the", "the " * 9):
        pair = ours.encode_pair(query, "old sea")
        assert [*ours.encode_pairs(query, ["old sea"], most=len(pair))] == [pair]
        for most in (0, len(pair) - 1):
            with pytest.raises(ContextFullError):
                next(ours.encode_pairs(query, ["old sea"], most=most))


@pytest.mark.parametrize(("key", "where"), [("add_bos", "before"), ("add_eos", "after")])
def test_pairs_need_separators(key: str, where: str) -> None:
    with pytest.raises(ValueError, match=f"puts no token {where} a text"):
        tokenizer_of(
            {
                **_SMALL,
                "tokenizer.ggml.add_bos_token": True,
                "tokenizer.ggml.bos_token_id": 0,
                f"tokenizer.ggml.{key}_token": False,
            }
        ).encode_pair("a", "a")


def test_long_texts_are_read_in_parts(pair: tuple[Tokenizer, HuggingFace]) -> None:
    """A part may begin at a space or an ideograph, and nowhere else."""
    for part in (
        "東京naïve e\u0301\u0323 x",
        "hello\u0301",
        "東\u0301\u0300",
        " \u0301a\n\u0323",
        "각\t",
    ):
        check(pair, part * 3000)
    check(pair, "".join(TEXTS) * 50)


def test_limit_of_tokens() -> None:
    ours = word_pieces(encoders.WORD_PIECES)
    assert len(ours.encode("the " * 5, most=7)) == 7
    with pytest.raises(ValueError, match="more than 6 tokens"):
        ours.encode("the " * 5, most=6)


def test_vocab_txt(tmp_path: Path) -> None:
    """Checkpoints of BERT's first years have no tokenizer.json."""
    (tmp_path / "vocab.txt").write_text("\n".join([*encoders.WORD_PIECES, ""]), encoding="utf-8")
    write_json(tmp_path / "tokenizer_config.json", {"do_lower_case": False})
    tokens = read_tokens(tmp_path)
    assert tokens.model == "bert"
    assert tokens.ids["##ing"] == encoders.WORD_PIECES.index("##ing")
    assert tokens.flags == {"normalizer.lowercase": False, "normalizer.strip_accents": False}
    assert tokens.special_ids["seperator"] == 3
    write_json(tmp_path / "tokenizer_config.json", {"tokenize_chinese_chars": False})
    with pytest.raises(ValueError, match="handle_chinese_chars is False"):
        read_tokens(tmp_path)


def test_normalized_added_tokens_are_refused(tmp_path: Path) -> None:
    """They match text in lower case, too."""
    for lower in (True, False):
        original = encoders.write_word_pieces(tmp_path, lowercase=lower)
        original.add_tokens([AddedToken("Café", normalized=False)])
        original.save(str(tmp_path / "tokenizer.json"))
        assert "Café" in [token.text for token in read_tokens(tmp_path).added]
        original.add_tokens([AddedToken("Boat", normalized=True)])
        original.save(str(tmp_path / "tokenizer.json"))
        if lower:
            with pytest.raises(ValueError, match="added token 'Boat' is normalized"):
                read_tokens(tmp_path)
        else:
            assert "Boat" in [token.text for token in read_tokens(tmp_path).added]


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("normalizer.clean_text", False, "clean_text is False"),
        ("normalizer.lowercase", 1, "lowercase is 1"),
        ("model.continuing_subword_prefix", "@@", "no name for normalizer"),
        ("pre_tokenizer", {"type": "Whitespace"}, "no name for normalizer"),
    ],
)
def test_unknown_steps_are_refused(tmp_path: Path, key: str, value: object, why: str) -> None:
    import json

    encoders.write_word_pieces(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    place = tokenizer
    *parents, last = key.split(".")
    for parent in parents:
        place = place[parent]
    place[last] = value
    write_json(file, tokenizer)
    with pytest.raises(ValueError, match=why):
        read_tokens(tmp_path)


# ---- Unigram ----


@pytest.fixture(scope="module")
def sentencepiece() -> SentencePieceProcessor:
    """A model of 400 pieces that is normalized as XLM-RoBERTa's."""
    model = io.BytesIO()
    texts = [line for text in TEXTS for line in text.splitlines() if "\x00" not in line] * 3
    words = re.findall(r"\w+", "the old man and the sea went to a boat with some of his friends")
    texts += [" ".join(words[i:] + words[:i]) for i in range(len(words))] * 4
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=400, model_type="unigram",
        normalization_rule_name="nmt_nfkc", character_coverage=0.98, hard_vocab_limit=False,
        minloglevel=2,
    )  # fmt: skip
    return SentencePieceProcessor(model_proto=model.getvalue())


def charsmap(model: SentencePieceProcessor) -> bytes:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    found = ModelProto.FromString(model.serialized_model_proto())
    return bytes(found.normalizer_spec.precompiled_charsmap)


def unigram_metadata(model: SentencePieceProcessor) -> dict[str, Any]:
    ids = range(model.vocab_size())
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.token_type": [
            2 if model.is_unknown(i) else 3 if model.is_control(i) else 1 for i in ids
        ],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.precompiled_charsmap": list(charsmap(model)),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.add_bos_token": True,
    }


@pytest.fixture(scope="module")
def unigram(sentencepiece: SentencePieceProcessor) -> Tokenizer:
    return tokenizer_of(unigram_metadata(sentencepiece))


@pytest.fixture(scope="module")
def original(sentencepiece: SentencePieceProcessor) -> HuggingFace:
    """Returns the same model in tokenizers, which sums scores in float64, as we do."""
    ids = range(sentencepiece.vocab_size())
    pieces = [(sentencepiece.id_to_piece(i), sentencepiece.get_score(i)) for i in ids]
    found = HuggingFace(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    found.normalizer = normalizers.Precompiled(charsmap(sentencepiece))
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    return found


Originals = tuple[SentencePieceProcessor, HuggingFace]


@pytest.fixture(scope="module")
def originals(sentencepiece: SentencePieceProcessor, original: HuggingFace) -> Originals:
    return sentencepiece, original


def ids_of(originals: Originals, text: str) -> list[list[int]]:
    """By both, which differ where sums are nearly equal, and about graphemes of several letters."""
    return [originals[0].encode(text), originals[1].encode(text).ids]


def test_unigram(originals: Originals, unigram: Tokenizer) -> None:
    for text in [*TEXTS, "the old man and the sea", "ﬁ ㈱ ① ｶﾞ \u00a0a\u00a0"]:
        ids = unigram.encode(text, add_special=False)
        assert ids in ids_of(originals, text), text
        assert unigram.encode(text) == [1, *ids, 2]


def test_long_unigram_texts(original: HuggingFace, unigram: Tokenizer) -> None:
    """Parts of words are summed as by tokenizers, which divides texts at white space too."""
    text = "the old man and  the sea \n naïve ﬁ ① 我想 🦙🦙 " * 500
    assert unigram.encode(text, add_special=False) == original.encode(text).ids


@given(text=st.text("thesaodmn '\n\t.,0é我🦙\u3000\u00a0ﬁ①▁"))
@settings(max_examples=examples(100))
def test_unigram_of_any_text(originals: Originals, unigram: Tokenizer, text: str) -> None:
    assert unigram.encode(text, add_special=False) in ids_of(originals, text)


@pytest.fixture(scope="module")
def checkpoint(
    sentencepiece: SentencePieceProcessor, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, HuggingFace]:
    """XLM-RoBERTa's tokenizer.json, as transformers writes it."""
    import transformers

    path = tmp_path_factory.mktemp("xlm")
    size = sentencepiece.vocab_size()
    pieces = [(sentencepiece.id_to_piece(i), sentencepiece.get_score(i)) for i in range(3, size)]
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab = [*special, *pieces, ("<mask>", 0.0)]
    tokenizer = transformers.XLMRobertaTokenizer(
        vocab=vocab, _spm_precompiled_charsmap=charsmap(sentencepiece)
    )
    tokenizer.save_pretrained(path)
    return path, HuggingFace.from_file(str(path / "tokenizer.json"))


def converted(path: Path) -> Tokenizer:
    """The tokenizer that is written for a checkpoint."""
    from gguf import GGUFWriter

    from h2o_cpp import _core

    size = HuggingFace.from_file(str(path / "tokenizer.json")).get_vocab_size()
    vocabulary = read_vocabulary(path, {}, size=size, add_bos=False, control_tokens=frozenset())
    writer = GGUFWriter(path / "vocabulary.gguf", "bert")
    vocabulary.write(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer(_core.GgufFile(path / "vocabulary.gguf"), size)


@packages("transformers")
def test_converted_unigram(checkpoint: tuple[Path, HuggingFace]) -> None:
    path, original = checkpoint
    ours = converted(path)
    texts = ["the old man", " the  sea ", "a\tb\n", "naïve ﬁ ①", "我想 日本語 한국어", "🦙🦙 x"]
    for text in texts:
        assert ours.encode(text) == original.encode(text).ids, text
    pair = original.encode(texts[0], texts[1])
    assert ours.encode_pair(texts[0], texts[1]) == pair.ids


@packages("transformers")
@pytest.mark.parametrize("content", [" ", "▁"])
def test_steps_of_a_converted_sentencepiece_model(
    checkpoint: tuple[Path, HuggingFace], sentencepiece: SentencePieceProcessor, tmp_path: Path,
    content: str,
) -> None:  # fmt: skip
    """transformers' SpmConverter strips the end of a text and replaces runs of spaces."""
    original = HuggingFace.from_file(str(checkpoint[0] / "tokenizer.json"))
    original.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(charsmap(sentencepiece)),
            normalizers.Strip(left=False, right=True),
            normalizers.Replace(Regex(" {2,}"), content),
        ]
    )
    original.pre_tokenizer = pre_tokenizers.Metaspace()
    original.save(str(tmp_path / "tokenizer.json"))
    ours = converted(tmp_path)
    for text in ("the old man", " the  sea ", "   a\tb \n", "naïve ﬁ   ①", "", " ", "a "):
        assert ours.encode(text) == original.encode(text).ids, text


@packages("transformers")
@pytest.mark.parametrize(
    "steps",
    [
        [],
        [normalizers.Replace(Regex(" {2,}"), " ")],
        [normalizers.Strip(left=False, right=True)],
        [normalizers.Replace(Regex(" {2,}"), "▁"), normalizers.Strip(left=False, right=True)],
        [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")],
    ],
)
def test_other_unigram_steps_are_refused(
    checkpoint: tuple[Path, HuggingFace], tmp_path: Path, steps: list[Any]
) -> None:
    """They keep spaces that we remove."""
    original = HuggingFace.from_file(str(checkpoint[0] / "tokenizer.json"))
    original.normalizer = normalizers.Sequence(steps)
    original.pre_tokenizer = pre_tokenizers.Metaspace()
    original.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"no name for normalizer .* of a unigram model"):
        read_tokens(tmp_path)


# ---- Damaged files ----

_SMALL: dict[str, Any] = {
    "tokenizer.ggml.model": "t5",
    "tokenizer.ggml.tokens": ["<pad>", "</s>", "<unk>", "▁", "a", "▁a"],
    "tokenizer.ggml.token_type": [3, 3, 2, 1, 1, 1],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -1.5],
}


def test_defaults_of_t5() -> None:
    ours = tokenizer_of(_SMALL)
    assert ours.encode("a aa xx") == [5, 5, 4, 3, 2, 1]
    assert ours.decode(ours.encode("a aa")) == "a aa"


def test_damaged_charsmaps() -> None:
    key = "tokenizer.ggml.precompiled_charsmap"
    for bad in ([4, 0, 0], [255] * 20, [3, 0, 0, 0, *range(9)], [8, 0, 0, 0, *range(4)]):
        with pytest.raises(ValueError, match="precompiled_charsmap has"):
            tokenizer_of({**_SMALL, key: bad})
    # Any units are read without leaving the trie.
    for pattern in ([255] * 4, [0, 1, 0, 1], [97, 5, 4, 3]):
        trie = pattern * 300
        damaged = tokenizer_of({**_SMALL, key: [*len(trie).to_bytes(4, "little"), *trie, 97, 0]})
        assert damaged.encode("abc the old man 東京")[-1] == 1


def test_limits_of_charsmaps() -> None:
    """A trie may have cycles: each of these units is followed by another for the letter a."""
    key = "tokenizer.ggml.precompiled_charsmap"
    trie = (1 << 10 | 1 << 8 | ord("a")).to_bytes(4, "little") * 256
    at = 1 << 10 | 1 << 8 | ord("a")  # of the replacement of any number of letters

    def encode(text: str, replacement: bytes) -> list[int]:
        data = len(trie).to_bytes(4, "little") + trie + b"b" * at + replacement + b"\0"
        return tokenizer_of({**_SMALL, key: [*data]}).encode(text)

    assert encode("a" * 64, b"aaa") == [5, 4, 4, 1]
    assert encode("a" * 65, b"aaa") == [5, 4, 4, 4, 4, 4, 1]
    assert encode("a" * 64, b"a" * 256) == [5, *[4] * 255, 1]
    assert encode("a" * 64, b"a" * 257) == [5, *[4] * 63, 1]
    assert encode("a" * 500_000, b"a" * 257) == [5, *[4] * 499_999, 1]


def test_damaged_scores() -> None:
    key = "tokenizer.ggml.scores"
    with pytest.raises(ValueError, match="scores has 2 entries"):
        tokenizer_of({**_SMALL, key: [0.5, 0.5]})
    with pytest.raises(ValueError, match="scores has nan"):
        tokenizer_of({**_SMALL, key: [float("nan"), *_SMALL[key][1:]]})
