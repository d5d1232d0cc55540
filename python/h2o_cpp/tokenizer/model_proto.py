"""A SentencePiece model file, written field by field: the few that matter here.

Field numbers are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from h2o_cpp.tokenizer.vocabulary import TokenType

_BPE = 2  # TrainerSpec.ModelType


def model_proto(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
) -> bytes:
    """ModelProto of a BPE model that leaves characters as they are."""
    pieces = b"".join(
        _bytes(1, _bytes(1, token.encode()) + _float(2, score) + _int(3, kind))
        for token, score, kind in zip(tokens, scores, types, strict=True)
    )
    trainer = _int(3, _BPE) + _int(4, len(tokens)) + _int(35, TokenType.BYTE in types)
    normalizer = (
        _bytes(1, b"identity") + _int(3, add_dummy_prefix) + _int(4, remove_extra_whitespaces)
    )
    return pieces + _bytes(2, trainer) + _bytes(3, normalizer)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)
