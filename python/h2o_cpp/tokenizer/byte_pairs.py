"""Byte-level BPE (tokenizer.ggml.model = "gpt2"), run by the tokenizers library."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import AddedToken, Tokenizer, models

from h2o_cpp.tokenizer.metadata import Metadata, get, get_array
from h2o_cpp.tokenizer.pre_tokenizers import pre_tokenizer
from h2o_cpp.tokenizer.vocabulary import TokenType, Vocabulary, add_bos


class BytePairs:
    """A byte-level BPE tokenizer. Nothing is put in front of a text."""

    begins_with_space = False

    def __init__(self, metadata: Metadata, n_vocab: int) -> None:
        pre = pre_tokenizer(
            get(metadata, "tokenizer.ggml.pre", str, None), metadata.get("general.architecture")
        )
        self.vocabulary = Vocabulary.read(metadata, n_vocab, {})
        self.add_bos = add_bos(metadata, default=pre.add_bos)
        tokens, types = self.vocabulary.tokens, self.vocabulary.types

        # Special tokens stay out, so that no text can become one.
        vocab = {t: i for i, t in enumerate(tokens) if not self.vocabulary.silent(i)}
        merges = [_parts(m) for m in get_array(metadata, "tokenizer.ggml.merges", str)]
        for left, right in merges:  # the library may panic
            for token in (left, right, left + right):
                if token not in vocab:
                    raise ValueError(f"tokenizer.ggml.merges makes {token!r}, which is no token")
        try:
            bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"tokenizer.ggml.tokens make no vocabulary: {error}") from None
        self._bpe = Tokenizer(bpe)
        if normalizer := pre.normalizer():
            self._bpe.normalizer = normalizer
        self._bpe.pre_tokenizer = pre.build()
        whole = [t for t, k in zip(tokens, types, strict=True) if k == TokenType.USER_DEFINED]
        self._bpe.add_tokens([AddedToken(token) for token in whole])

        byte_of = _byte_of_character()
        self.bytes = [
            b"" if self.vocabulary.silent(i) else _token_bytes(token, types[i], byte_of)
            for i, token in enumerate(tokens)
        ]

    def encode(self, text: str, *, begins: bool) -> list[int]:
        """Tokens of `text`, the same at the beginning of a text and further on."""
        del begins
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids


def _parts(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)  # a part may be a space
    if at < 0 or at + 1 == len(merge):
        raise ValueError(f"tokenizer.ggml.merges has {merge!r}, expected two parts and a space")
    return merge[:at], merge[at + 1 :]


def _byte_of_character() -> dict[str, int]:
    """GPT-2's visible character for each byte, inverted."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


def _token_bytes(token: str, kind: int, byte_of: Mapping[str, int]) -> bytes:
    if kind != TokenType.USER_DEFINED and all(c in byte_of for c in token):
        return bytes(byte_of[c] for c in token)
    return token.encode("utf-8", "replace")
