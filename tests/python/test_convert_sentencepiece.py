"""Conversion of SentencePiece BPE from tokenizer.model and tokenizer.json."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer

from h2o_cpp._core import GgufFile
from support.opt_checkpoint import write_json
from support.tokenizer_files import (
    BYTE,
    BYTES,
    CONTROL,
    METASPACE,
    NORMAL,
    PIECES,
    PREPEND,
    REPLACE,
    SPACES,
    TEXTS,
    TRAINER,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    encode_field,
    encode_model,
    read_tokens,
    write_sentencepiece_json,
    write_tokenizer_model,
)


def test_sentencepiece_model(tmp_path: Path) -> None:
    write_tokenizer_model(tmp_path)
    vocabulary = read_tokens(tmp_path, len(PIECES) + 2)
    size = len(PIECES)
    assert vocabulary.model == "llama"
    assert vocabulary.pre == "default"
    assert vocabulary.tokens == [text for text, _, _ in PIECES] + [
        f"[PAD{size}]",
        f"[PAD{size + 1}]",
    ]
    assert vocabulary.types == [kind for _, _, kind in PIECES] + [UNUSED, UNUSED]
    assert vocabulary.scores == [score for _, score, _ in PIECES] + [-10000, -10000]
    assert vocabulary.special_ids == {"unknown": 0, "bos": 1, "eos": 2}
    assert vocabulary.flags == {"add_bos_token": True, "add_space_prefix": True}
    assert not vocabulary.merges


def test_all_piece_types(tmp_path: Path) -> None:
    kinds = [NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED]
    pieces = [*BYTES, *((f"▁{kind}", 0.5, kind) for kind in kinds)]
    trainer = {3: 2, 40: 257, 41: 258, 42: -1, 43: 3}
    normalizer: dict[int, int | bytes] = {1: b"identity", 2: b"", 3: 0, 4: 1}
    write_tokenizer_model(tmp_path, encode_model(pieces, trainer, normalizer))
    vocabulary = read_tokens(tmp_path, len(pieces))
    assert vocabulary.types == [BYTE] * 256 + kinds
    assert vocabulary.tokens[256:] == [
        "▁1",
        "▁2",
        "▁3",
        " 4",
        "▁5",
    ]  # user-defined pieces: ▁ becomes a space
    assert vocabulary.special_ids == {"unknown": 257, "bos": 258, "padding": 3}
    assert vocabulary.flags == {
        "add_bos_token": True,
        "add_space_prefix": False,
        "remove_extra_whitespaces": True,
    }


def test_added_tokens(tmp_path: Path) -> None:
    write_tokenizer_model(tmp_path)
    size = len(PIECES)
    write_json(tmp_path / "added_tokens.json", {"▁user▁": size, "<|im_end|>": size + 1})
    settings = {
        "add_bos_token": False,
        "add_eos_token": True,
        "add_prefix_space": False,
        "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}},
        "eos_token": "</s>",
        "chat_template": "old",
    }
    write_json(tmp_path / "tokenizer_config.json", settings)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    vocabulary = read_tokens(tmp_path, size + 2, {"bos_token_id": 1, "eos_token_id": [7, 8]})
    assert vocabulary.tokens[size:] == [" user ", "<|im_end|>"]
    assert vocabulary.types[size:] == [USER_DEFINED, CONTROL]
    assert vocabulary.types[:3] == [CONTROL, CONTROL, CONTROL]  # like llama.cpp's converter
    assert [vocabulary.scores[i] for i in (0, 1, size, size + 1)] == [-1000, 0, -1000, -1000]
    assert vocabulary.special_ids == {"unknown": 0, "bos": 1, "eos": 2, "eot": size + 1}
    assert vocabulary.flags == {
        "add_bos_token": False,
        "add_eos_token": True,
        "add_space_prefix": False,
    }
    assert vocabulary.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not every byte has a token"),
        (b"not a model", "not a readable SentencePiece model"),
        (encode_model()[:-1], "not a readable SentencePiece model"),
        (encode_model(trainer={3: 1}), "it is not a BPE model"),
        (encode_model(trainer={}), "it is not a BPE model"),
        (encode_model(trainer={3: 2, 24: 1}), "it puts spaces at the ends of words"),
        (encode_model(normalizer={2: b"\1"}), "it normalizes characters"),
        (encode_model(normalizer={5: 0}), "it keeps spaces"),
        (encode_model(PIECES[:200]), "not every byte has a token"),
        (encode_model([*PIECES, ("a", 0.0, NORMAL)]), "two pieces are the same"),
        (encode_model() + encode_field(2, 5) + b"\x0a", "not a readable SentencePiece model"),
        (encode_model() + encode_field(1, b"\x0a\x01\xff"), "not a readable SentencePiece model"),
    ],
)
def test_unsupported_models_are_rejected(tmp_path: Path, data: bytes, message: str) -> None:
    write_tokenizer_model(tmp_path, data if data != b"" else encode_field(2, b"\x18\x02"))
    with pytest.raises(ValueError, match=rf"tokenizer\.model: {message}"):
        read_tokens(tmp_path, len(PIECES))


@pytest.mark.parametrize("field", [encode_field(99, 1), encode_field(1, 5)])
def test_unknown_fields_are_skipped(tmp_path: Path, field: bytes) -> None:
    """Unknown fields and fields of another wire type; sentencepiece skips them too."""
    data = encode_model(trainer=TRAINER | {35: 1}) + field
    write_tokenizer_model(tmp_path, data)
    assert read_tokens(tmp_path, len(PIECES)).types == [kind for _, _, kind in PIECES]
    assert SentencePieceProcessor(model_proto=data).GetPieceSize() == len(PIECES)


def test_unknown_piece_type_is_normal(tmp_path: Path) -> None:
    """Like sentencepiece."""
    data = encode_model([*PIECES, ("b", 0.0, 7)], TRAINER | {35: 1})
    write_tokenizer_model(tmp_path, data)
    assert read_tokens(tmp_path, len(PIECES) + 1).types[-1] == NORMAL
    assert SentencePieceProcessor(model_proto=data).encode("b", out_type=str)[-1] == "b"


def test_corrupt_models_are_read_or_raise_value_error(tmp_path: Path) -> None:
    good = encode_model()
    for i in [*range(200), *range(len(good) - 60, len(good))]:
        for byte in b"\x00\x01\x7f\xff":
            write_tokenizer_model(tmp_path, good[:i] + bytes([byte]) + good[i + 1 :])
            with contextlib.suppress(ValueError):
                read_tokens(tmp_path, 2 * len(PIECES))


def test_vocabulary_larger_than_vocab_size_is_rejected(tmp_path: Path) -> None:
    write_tokenizer_model(tmp_path)
    with pytest.raises(
        ValueError, match=r"token ids 0 to 261, but config\.json has vocab_size 261"
    ):
        read_tokens(tmp_path, 261)


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "prefix"),
    [
        (None, METASPACE, True),
        (None, METASPACE | {"prepend_scheme": "always"}, True),
        (None, METASPACE | {"prepend_scheme": "never"}, False),
        (PREPEND, None, True),
        (REPLACE, None, False),
        (REPLACE, SPACES, False),  # Gemma
    ],
)
def test_merge_ranks_become_scores(
    tmp_path: Path, normalizer: object, pre_tokenizer: object, prefix: bool
) -> None:
    write_sentencepiece_json(tmp_path, normalizer=normalizer, pre_tokenizer=pre_tokenizer)
    vocabulary = read_tokens(tmp_path, len(TEXTS) + 1)
    assert vocabulary.model == "llama"
    assert vocabulary.tokens == [*TEXTS, f"[PAD{len(TEXTS)}]"]
    assert vocabulary.types == [CONTROL] * 3 + [BYTE] * 256 + [NORMAL] * 6 + [UNUSED]
    assert vocabulary.scores[-7:] == [-3, -3, -3, 0, -1, -2, -10000]
    assert vocabulary.special_ids == {"bos": 1, "eos": 2, "unknown": 0}
    assert vocabulary.flags == {"add_bos_token": True, "add_space_prefix": prefix}


@pytest.mark.parametrize("scheme", ["first", "always"])
@pytest.mark.parametrize("model", [False, True], ids=["tokenizer.json", "tokenizer.model"])
def test_a_space_before_the_first_text_only(tmp_path: Path, scheme: str, model: bool) -> None:
    """A file cannot express it, as transformers' own tokenizer shows."""
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    write_sentencepiece_json(
        tmp_path,
        pre_tokenizer=METASPACE | {"prepend_scheme": scheme},
        post_processor=None,
        added_tokens=[token | {"id": i, "content": TEXTS[i], "special": True} for i in range(3)],
    )
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    always = theirs.encode("a</s>a").tokens == ["▁a", "</s>", "▁a"]
    assert always == (scheme == "always")
    if model:
        (tmp_path / "tokenizer.model").write_bytes(encode_model())
    note = "transformers adds a space only to text at the start, not to text after a special token"
    found = read_tokens(tmp_path, 265).notes
    assert [text.split(";")[0] for text in found] == ([] if always else [note])
    write_json(tmp_path / "tokenizer_config.json", {"add_prefix_space": False})
    assert read_tokens(tmp_path, 265).notes == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__merges": ["a b", "▁ ab", "▁ a", "▁a b"]}, "the merges to '▁ab' are not of one"),
        ({"model__merges": ["a b", "▁ a", "▁ ab"]}, "'▁ab' has no merge of '▁a' and 'b'"),
        ({"model__vocab": {"a": 0, "b": 1}, "model__merges": []}, "no merges"),
        ({"model__vocab": dict.fromkeys(TEXTS[3:-9], 3) | {"ab": 4, "a": 5, "b": 6}},
         "merge '▁ a' needs '▁'"),
        ({"pre_tokenizer": METASPACE | {"split": True}}, "llama.cpp has no name for"),
        ({"pre_tokenizer": None}, "llama.cpp has no name for"),
        ({"model__ignore_merges": True}, "llama.cpp has no name for"),
    ],
)  # fmt: skip
def test_inexact_scores_are_rejected(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    write_sentencepiece_json(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_tokens(tmp_path, len(TEXTS))


def test_missing_byte_tokens_are_rejected(tmp_path: Path) -> None:
    vocab = {text: i for i, text in enumerate(TEXTS) if text != "<0x41>"}
    write_sentencepiece_json(tmp_path, model__vocab=vocab)
    with pytest.raises(ValueError, match="not every byte has a token"):
        read_tokens(tmp_path, len(TEXTS))


def test_llama_2(shared: Path) -> None:
    vocabulary = read_tokens(shared / "tokenizers" / "llama2", 32000)
    file = shared / "tokenizers/ggml-vocab/ggml-vocab-llama-spm.gguf"
    expected = GgufFile(file).metadata()
    assert vocabulary.tokens == expected["tokenizer.ggml.tokens"]
    assert vocabulary.types == expected["tokenizer.ggml.token_type"]
    assert vocabulary.scores == expected["tokenizer.ggml.scores"]
    assert vocabulary.special_ids == {"unknown": 0, "bos": 1, "eos": 2}
    assert vocabulary.flags == {"add_bos_token": True, "add_space_prefix": True}


def test_vocabulary_equals_sentencepiece(shared: Path) -> None:
    for path in (shared / "tokenizers" / "llama2", shared / "models" / "stories260K"):
        processor = SentencePieceProcessor(str(path / "tokenizer.model"))
        size = processor.vocab_size()
        vocabulary = read_tokens(path, size)
        assert vocabulary.tokens == [processor.IdToPiece(i) for i in range(size)]
        assert vocabulary.scores == [processor.GetScore(i) for i in range(size)]
        for i, kind in enumerate(vocabulary.types):
            assert (kind == UNKNOWN) == processor.IsUnknown(i)
            assert (kind == CONTROL) == processor.IsControl(i)
            assert (kind == BYTE) == processor.IsByte(i)
