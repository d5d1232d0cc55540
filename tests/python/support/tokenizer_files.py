"""Writers of SentencePiece models (tokenizer.model, a protobuf) and other tokenizer files."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from h2o_cpp.convert.vocabulary import Vocabulary, read_vocabulary
from support.opt_checkpoint import write_json, write_tokenizer_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTES = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
SPECIAL = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
PIECES = [*SPECIAL, *BYTES, ("▁a", -0.0, NORMAL), ("▁", -1.0, NORMAL), ("a", -2.0, NORMAL)]
TRAINER = {3: 2}  # model_type: BPE
NORMALIZER = {4: 0}  # remove_extra_whitespaces


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    encoded = b""
    while value > 0x7F:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


def encode_field(number: int, value: int | float | bytes | str) -> bytes:
    """A protobuf field: an integer, a 32-bit float, a message or a string."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _message(fields: dict[int, int] | dict[int, int | bytes]) -> bytes:
    return b"".join(encode_field(number, value) for number, value in fields.items())


def encode_model(
    pieces: Sequence[tuple[str, float, int]] = PIECES,
    trainer: dict[int, int] = TRAINER,
    normalizer: dict[int, int | bytes] | None = None,
) -> bytes:
    data = b""
    for text, score, kind in pieces:
        piece = encode_field(1, text) + encode_field(2, score)
        data += encode_field(1, piece + (encode_field(3, kind) if kind != NORMAL else b""))
    data += encode_field(2, _message(trainer))
    return data + encode_field(3, _message(NORMALIZER if normalizer is None else normalizer))


def write_tokenizer_model(path: Path, data: bytes | None = None) -> None:
    """Write tokenizer.model to a checkpoint and remove tokenizer.json."""
    (path / "tokenizer.json").unlink(missing_ok=True)
    (path / "tokenizer.model").write_bytes(encode_model() if data is None else data)


def template(before: list[str], after: list[str]) -> dict[str, Any]:
    """A post_processor for tokenizer.json that adds tokens before and after a text."""
    parts: list[dict[str, Any]] = [{"SpecialToken": {"id": t, "type_id": 0}} for t in before]
    parts.append({"Sequence": {"id": "A", "type_id": 0}})
    parts += [{"SpecialToken": {"id": t, "type_id": 0}} for t in after]
    return {"type": "TemplateProcessing", "single": parts, "pair": []}


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, REPLACE]}
TEXTS = [text for text, _, _ in [*SPECIAL, *BYTES]] + ["▁", "a", "b", "ab", "▁a", "▁ab"]


def write_sentencepiece_json(path: Path, **changes: object) -> None:
    """Write a SentencePiece BPE as tokenizer.json, with changes by key ("__" for a dot)."""
    write_tokenizer_json(
        path,
        {
            "added_tokens": [{"id": i, "content": TEXTS[i], "special": True} for i in range(3)],
            "pre_tokenizer": METASPACE,
            "post_processor": template(["<s>"], []),
            "model.vocab": {text: i for i, text in enumerate(TEXTS)},
            "model.merges": ["a b", "▁ a", "▁ ab", "▁a b"],
            "model.byte_fallback": True,
        }
        | {key.replace("__", "."): value for key, value in changes.items()},
    )
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(path / "tokenizer_config.json", settings)


def read_tokens(path: Path, size: int, config: dict[str, Any] | None = None) -> Vocabulary:
    """The vocabulary of a checkpoint, for a family without extra control tokens."""
    return read_vocabulary(path, config or {}, size=size, add_bos=False, control_tokens=frozenset())
