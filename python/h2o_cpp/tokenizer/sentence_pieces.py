"""SentencePiece BPE (tokenizer.ggml.model = "llama"), run by the sentencepiece library."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from sentencepiece import SentencePieceProcessor

from h2o_cpp.tokenizer.metadata import Metadata, get, get_array, get_token
from h2o_cpp.tokenizer.model_proto import model_proto
from h2o_cpp.tokenizer.vocabulary import TokenType, Vocabulary, add_bos

_SPACE = "\u2581"  # what SentencePiece writes for a space
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class SentencePieces:
    """A SentencePiece BPE tokenizer. Most put a space in front of a text."""

    def __init__(self, metadata: Metadata, n_vocab: int) -> None:
        self.vocabulary = Vocabulary.read(metadata, n_vocab, {"bos": 1, "eos": 2})
        self.add_bos = add_bos(metadata, default=True)
        self.begins_with_space: bool = get(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
        self._one_space: bool = get(
            metadata, "tokenizer.ggml.remove_extra_whitespaces", bool, False
        )
        self._tokens = [token.replace(" ", _SPACE) for token in self.vocabulary.tokens]
        self._scores: list[float] = get_array(metadata, "tokenizer.ggml.scores", float)
        if len(self._scores) != n_vocab:
            raise ValueError(
                f"tokenizer.ggml.scores has {len(self._scores)} entries, the model has {n_vocab}"
            )
        get(metadata, "tokenizer.ggml.token_type", list)  # without, bytes would be text
        unknown = get_token(metadata, "unknown", n_vocab, 0)
        self._types = _with_one_unknown(self.vocabulary.types, unknown)
        self._beginning = self._processor(begins=True)
        self.bytes = [
            b"" if self.vocabulary.silent(i) else _token_bytes(token, self._types[i])
            for i, token in enumerate(self._tokens)
        ]

    def encode(self, text: str, *, begins: bool) -> list[int]:
        """Tokens of `text`, at the beginning of a text or further on."""
        processor = self._beginning if begins else self._further_on
        ids: list[int] = processor.encode(text, out_type=int)
        return ids

    @cached_property
    def _further_on(self) -> SentencePieceProcessor:
        return self._processor(begins=False)

    def _processor(self, *, begins: bool) -> SentencePieceProcessor:
        processor = SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(
                model_proto(
                    self._tokens,
                    self._scores,
                    self._types,
                    add_dummy_prefix=begins and self.begins_with_space,
                    remove_extra_whitespaces=begins and self._one_space,
                )
            )
        except (RuntimeError, OverflowError, UnicodeEncodeError) as error:
            raise ValueError(f"tokenizer.ggml.tokens: not a SentencePiece model: {error}") from None
        return processor


def _with_one_unknown(types: Sequence[int], unknown: int | None) -> list[int]:
    """Types as SentencePiece wants them: exactly one token is the unknown one."""
    found = [i for i, kind in enumerate(types) if kind == TokenType.UNKNOWN]
    if unknown not in found:
        unknown = found[0] if found else unknown
    fixed = [TokenType.CONTROL if kind == TokenType.UNKNOWN else kind for kind in types]
    if unknown is not None:
        fixed[unknown] = TokenType.UNKNOWN
    return fixed


def _token_bytes(token: str, kind: int) -> bytes:
    if kind == TokenType.BYTE and (match := _BYTE.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE, " ").encode("utf-8", "replace")
