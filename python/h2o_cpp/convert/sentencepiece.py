"""Reads SentencePiece BPE models: tokenizer.model, and what HF makes of one in tokenizer.json.

The sentencepiece package does not tell a model's kind, its normalisation or which pieces are
user-defined, so the file, a protocol buffer (sentencepiece_model.proto), is read here.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from gguf import TokenType

from h2o_cpp.convert.tokens import AddedToken, Tokens

_Field = int | bytes

# Fields of ModelProto, SentencePiece, TrainerSpec and NormalizerSpec
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _WHITESPACE_AS_SUFFIX = 3, 24
_IDS = {"unknown": (40, 0), "bos": (41, 1), "eos": (42, 2), "padding": (43, -1)}
_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES, _ESCAPE_WHITESPACES = 2, 3, 4, 5
_BPE = 2  # of TrainerSpec.ModelType


def read_sentencepiece(path: Path, added: list[AddedToken]) -> Tokens:
    """Reads tokenizer.model; raises ValueError when it is damaged or not a BPE of plain text."""
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [_piece(_message(value)) for number, value in fields if number == _PIECES]
        by_number = dict(fields)
        trainer = dict(_fields(_message(by_number.get(_TRAINER, b""))))
        normalizer = dict(_fields(_message(by_number.get(_NORMALIZER, b""))))
    except (ValueError, struct.error) as error:
        raise ValueError(f"{path}: not a readable SentencePiece model ({error})") from error

    for value, why in (
        (trainer.get(_MODEL_TYPE) != _BPE, "it is not a BPE model"),
        (trainer.get(_WHITESPACE_AS_SUFFIX), "it puts spaces at the ends of words"),
        (normalizer.get(_CHARSMAP), "it normalises characters"),
        (not normalizer.get(_ESCAPE_WHITESPACES, 1), "it keeps spaces"),
    ):
        if value:
            raise ValueError(f"{path}: {why}; a GGUF file of model `llama` cannot express this")
    ids = {text: id for id, (text, _, _) in enumerate(pieces)}
    types = {text: type for text, _, type in pieces}
    if len(ids) < len(pieces):
        raise ValueError(f"{path}: two pieces are the same")
    _check_bytes(path, types)
    return Tokens(
        "llama",
        "default",
        ids,
        added,
        scores={text: score for text, score, _ in pieces},
        types=types,
        special_ids=_special_ids(trainer, len(pieces)),
        flags=_flags(normalizer),
    )


def scores_from_merges(
    path: Path, texts: AbstractSet[str], merges: Sequence[str]
) -> tuple[dict[str, float], dict[str, TokenType]]:
    """Scores and types by which SentencePiece merges just as BPE does by the ranks of merges.

    BPE makes the listed merge of least rank, SentencePiece the one to the piece of best score,
    listed or not. They agree if each way to make a piece is listed, and all in one run.
    Raises ValueError if they do not.
    """
    scores: dict[str, float] = {}
    last = None
    for merge in merges:
        piece = merge.replace(" ", "", 1)
        if piece != last and piece in scores:
            raise ValueError(f"{path}: the merges to {piece!r} are not of one rank")
        scores.setdefault(piece, float(-len(scores)))
        last = piece

    types = {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}
    types = {text: type for text, type in types.items() if text in texts}
    _check_bytes(path, types)
    listed = set(merges)
    for piece in texts - types.keys():
        for i in range(1, len(piece)):
            left, right = piece[:i], piece[i:]
            # SentencePiece begins with characters, whether they are pieces or not.
            mergeable = all(part in texts or len(part) == 1 for part in (left, right))
            if mergeable and f"{left} {right}" not in listed:
                raise ValueError(f"{path}: {piece!r} is a token, but {left!r}, {right!r} no merge")
    worst = float(-len(scores))  # never compared: what no merge makes, no score can make either
    return {text: scores.get(text, worst) for text in texts}, types


def _check_bytes(path: Path, types: Mapping[str, TokenType]) -> None:
    if list(types.values()).count(TokenType.BYTE) != 256:
        raise ValueError(f"{path}: not every byte has a token for characters without one")


def _flags(normalizer: Mapping[int, _Field]) -> dict[str, bool]:
    flags = {"add_space_prefix": bool(normalizer.get(_ADD_DUMMY_PREFIX, 1))}
    if normalizer.get(_REMOVE_EXTRA_WHITESPACES, 1):
        flags["remove_extra_whitespaces"] = True
    return flags


def _special_ids(trainer: Mapping[int, _Field], size: int) -> dict[str, int]:
    ids = {name: trainer.get(number, default) for name, (number, default) in _IDS.items()}
    # A special token that the model lacks has id -1.
    return {name: id for name, id in ids.items() if isinstance(id, int) and 0 <= id < size}


def _piece(data: bytes) -> tuple[str, float, TokenType]:
    fields = dict(_fields(data))
    text, score = _message(fields.get(_TEXT, b"")), _message(fields.get(_SCORE, bytes(4)))
    # The numbers of the types are those of GGUF.
    type = TokenType(_integer(fields.get(_TYPE, TokenType.NORMAL)))
    return text.decode("utf-8"), struct.unpack("<f", score)[0], type


def _message(value: _Field) -> bytes:
    if isinstance(value, bytes):
        return value
    raise ValueError("a number stands for a message")


def _integer(value: _Field) -> int:
    if isinstance(value, int):
        return value
    raise ValueError("a message stands for a number")


def _fields(data: bytes) -> Iterator[tuple[int, _Field]]:
    """Number and value of each field of a message: integers as such, all else as its bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 70, 7):
            if at >= len(data):
                break
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError(f"a number is cut off at byte {at} of {len(data)}")

    while at < len(data):
        key = varint()
        wire_type = key & 7
        if wire_type == 0:
            yield key >> 3, varint()
            continue
        sizes = {1: 8, 5: 4}
        if wire_type != 2 and wire_type not in sizes:
            raise ValueError(f"field {key >> 3} has the unknown wire type {wire_type}")
        size = varint() if wire_type == 2 else sizes[wire_type]
        if size > len(data) - at:
            raise ValueError(f"field {key >> 3} ends beyond its message")
        yield key >> 3, data[at : at + size]
        at += size
