"""What every kind of tokenizer has: tokens with their types, and which of them are special."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from h2o_cpp.tokenizer.metadata import Metadata, get, get_array, get_token


class TokenType(IntEnum):
    """tokenizer.ggml.token_type, numbered as in SentencePiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # has no text; read in text only where asked for
    USER_DEFINED = 4  # always read in text, whole
    UNUSED = 5
    BYTE = 6


# Tokens that end a turn whatever the file says of them, as in llama.cpp: files often name only one
# end, and declare the others normal.
_ENDS = frozenset(
    [
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
    ]
)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and their types by id."""

    tokens: list[str]
    types: list[int]
    bos: int | None
    eos: int | None
    end_tokens: frozenset[int]

    @classmethod
    def read(cls, metadata: Metadata, n_vocab: int, defaults: Mapping[str, int]) -> Vocabulary:
        """Read it; `defaults` has the ids of "bos" and "eos" where the file names none."""
        tokens: list[str] = get_array(metadata, "tokenizer.ggml.tokens", str)
        normal = [int(TokenType.NORMAL)] * len(tokens)
        types: list[int] = get_array(metadata, "tokenizer.ggml.token_type", int, normal)
        if len(tokens) != n_vocab or len(types) != n_vocab:
            raise ValueError(
                f"tokenizer.ggml.tokens has {len(tokens)} entries and token_type {len(types)}, "
                f"the model has {n_vocab}"
            )
        if bad := [kind for kind in types if not 1 <= kind <= 6]:
            raise ValueError(f"tokenizer.ggml.token_type has {bad[0]}, expected 1 to 6")
        bos, eos, eot, eom = (
            get_token(metadata, name, n_vocab, defaults.get(name))
            for name in ("bos", "eos", "eot", "eom")
        )
        by_text = {i for i, token in enumerate(tokens) if token in _ENDS}
        return cls(
            tokens=tokens,
            types=[TokenType.CONTROL if i in by_text else kind for i, kind in enumerate(types)],
            bos=bos,
            eos=eos,
            end_tokens=frozenset(by_text | {t for t in (eos, eot, eom) if t is not None}),
        )

    def silent(self, token: int) -> bool:
        """Whether a token stands for no text."""
        return self.types[token] in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.UNUSED)

    def special(self) -> dict[str, int]:
        """Tokens that are read in text only where asked for."""
        kinds = (TokenType.UNKNOWN, TokenType.CONTROL)
        pairs = zip(self.tokens, self.types, strict=True)
        return {token: i for i, (token, kind) in enumerate(pairs) if token and kind in kinds}


def add_bos(metadata: Metadata, default: bool) -> bool:
    """Whether a text begins with the token bos."""
    value: bool = get(metadata, "tokenizer.ggml.add_bos_token", bool, default)
    return value


def add_eos(metadata: Metadata) -> bool:
    """Whether a text ends with the token eos."""
    value: bool = get(metadata, "tokenizer.ggml.add_eos_token", bool, False)
    return value
