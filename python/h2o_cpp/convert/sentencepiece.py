"""SentencePiece BPE models: tokenizer.model, and HF's form of them in tokenizer.json."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from gguf import TokenType

from h2o_cpp.convert.tokens import AddedToken, Tokens


def read_sentencepiece(path: Path, added: list[AddedToken]) -> Tokens:
    """Read tokenizer.model. Raises ValueError if it is damaged or not a BPE of plain text."""
    model = _parse(path)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    for value, why in (
        (trainer.model_type != trainer.BPE, "it is not a BPE model"),
        (trainer.treat_whitespace_as_suffix, "it puts spaces at the ends of words"),
        (normalizer.precompiled_charsmap, "it normalizes characters"),
        (not normalizer.escape_whitespaces, "it keeps spaces"),
    ):
        if value:
            raise ValueError(f"{path}: {why}; a GGUF file of model `llama` cannot express this")
    ids = {piece.piece: id for id, piece in enumerate(model.pieces)}
    if len(ids) < len(model.pieces):
        raise ValueError(f"{path}: two pieces are the same")
    # The types have the same numbers in GGUF.
    types = {piece.piece: TokenType(piece.type) for piece in model.pieces}
    _check_bytes(path, types)
    flags = {"add_space_prefix": normalizer.add_dummy_prefix}
    if normalizer.remove_extra_whitespaces:
        flags["remove_extra_whitespaces"] = True
    special_ids = {
        "unknown": trainer.unk_id,
        "bos": trainer.bos_id,
        "eos": trainer.eos_id,
        "padding": trainer.pad_id,
    }
    return Tokens(
        "llama",
        "default",
        ids,
        added,
        scores={piece.piece: piece.score for piece in model.pieces},
        types=types,
        # Missing tokens have id -1.
        special_ids={name: id for name, id in special_ids.items() if 0 <= id < len(ids)},
        flags=flags,
    )


def _parse(path: Path) -> Any:
    """The ModelProto in a file.

    SentencePieceProcessor does not expose the model's type, its normalization or user-defined
    pieces; the protocol buffers do, and need `protobuf`.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    try:
        model = ModelProto.FromString(path.read_bytes())
    except (DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a readable SentencePiece model ({error})") from error
    for id, piece in enumerate(model.pieces):
        if not isinstance(piece.piece, str):  # protobuf returns invalid UTF-8 as bytes
            raise ValueError(
                f"{path}: not a readable SentencePiece model (piece {id} is not UTF-8)"
            )
    return model


def scores_from_merges(
    path: Path, texts: AbstractSet[str], merges: Sequence[str]
) -> tuple[dict[str, float], dict[str, TokenType]]:
    """Scores and types with which SentencePiece merges in the same order as BPE with `merges`.

    BPE applies the listed merge of lowest rank; SentencePiece the merge to the piece of highest
    score, listed or not. They agree if every way to form a piece is listed, consecutively.
    Raises ValueError otherwise.
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
            # SentencePiece begins with single characters, whether or not they are pieces.
            mergeable = all(part in texts or len(part) == 1 for part in (left, right))
            if mergeable and f"{left} {right}" not in listed:
                raise ValueError(f"{path}: token {piece!r} has no merge of {left!r} and {right!r}")
    worst = float(-len(scores))  # never compared: only merges form these pieces
    return {text: scores.get(text, worst) for text in texts}, types


def _check_bytes(path: Path, types: Mapping[str, TokenType]) -> None:
    if list(types.values()).count(TokenType.BYTE) != 256:
        raise ValueError(f"{path}: not every byte has a token for characters without one")
