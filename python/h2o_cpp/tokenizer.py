"""Text to tokens and back, by the vocabulary in a GGUF file's metadata (keys tokenizer.*)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

# tokenizer.ggml.pre: how text is cut before byte-pair merging.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
}


def _byte_of_character() -> dict[str, int]:
    """GPT-2's visible character for each byte, inverted."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


class TextTokenizer:
    """A byte-level BPE tokenizer (tokenizer.ggml.model = "gpt2").

    Raises ValueError for a vocabulary it does not know how to use.
    """

    def __init__(self, metadata: Mapping[str, Any], n_vocab: int) -> None:
        model = _get(metadata, "tokenizer.ggml.model", str)
        if model != "gpt2":
            raise ValueError(f"tokenizer.ggml.model is {model!r}, supported: 'gpt2'")
        pre = _get(metadata, "tokenizer.ggml.pre", str)
        if pre not in _PRE_TOKENIZERS:
            raise ValueError(
                f"tokenizer.ggml.pre is {pre!r}, supported: {', '.join(_PRE_TOKENIZERS)}"
            )
        tokens: list[str] = _get(metadata, "tokenizer.ggml.tokens", list)
        types: list[int] = _get(metadata, "tokenizer.ggml.token_type", list, [1] * len(tokens))
        if len(tokens) != n_vocab or len(types) != n_vocab:
            raise ValueError(
                f"tokenizer.ggml.tokens has {len(tokens)} entries and token_type {len(types)}, "
                f"the model has {n_vocab}"
            )
        merges = [_split_merge(merge) for merge in _get(metadata, "tokenizer.ggml.merges", list)]

        self.bos: int | None = _token_id(metadata, "bos", n_vocab)
        self.eos: int | None = _token_id(metadata, "eos", n_vocab)
        ends = {self.eos, _token_id(metadata, "eot", n_vocab)}
        self.end_tokens: frozenset[int] = frozenset(t for t in ends if t is not None)
        self._add_bos: bool = _get(metadata, "tokenizer.ggml.add_bos_token", bool, False)
        if self._add_bos and self.bos is None:
            raise ValueError("tokenizer.ggml.add_bos_token is true but bos_token_id is missing")

        vocab = {token: i for i, token in enumerate(tokens)}
        try:
            self._bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"tokenizer.ggml.merges do not fit the vocabulary: {error}") from None
        self._bpe.pre_tokenizer = _PRE_TOKENIZERS[pre]()
        self._bpe.decoder = decoders.ByteLevel()
        special = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
        self._bpe.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in special]
        )

        silent = (_UNKNOWN, _CONTROL, _UNUSED)
        byte_of = _byte_of_character()
        self._bytes = [
            b"" if kind in silent else _token_bytes(token, kind, byte_of)
            for token, kind in zip(tokens, types, strict=True)
        ]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Tokens of `text`; add_special: with the beginning-of-text token if the model has one."""
        try:
            ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: {error.reason}") from None
        return [self.bos, *ids] if add_special and self._add_bos and self.bos is not None else ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token: part of a character, or several; none for control tokens."""
        return self._bytes[token]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")


_REQUIRED = object()


def _get(metadata: Mapping[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = metadata.get(key, default)
    if value is _REQUIRED:
        raise ValueError(f"{key} is missing")
    if not isinstance(value, kind):
        raise ValueError(f"{key} is a {type(value).__name__}, expected {kind.__name__}")
    return value


def _token_id(metadata: Mapping[str, Any], name: str, n_vocab: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
        return None
    token: int = _get(metadata, key, int)
    if not 0 <= token < n_vocab:
        raise ValueError(f"{key} is {token}, the vocabulary has {n_vocab} tokens")
    return token


def _split_merge(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ValueError(f"tokenizer.ggml.merges has {merge!r}, expected two parts and a space")
    return left, right


def _token_bytes(token: str, kind: int, byte_of: Mapping[str, int]) -> bytes:
    if kind != _USER_DEFINED and all(c in byte_of for c in token):
        return bytes(byte_of[c] for c in token)
    return token.encode("utf-8", "replace")
