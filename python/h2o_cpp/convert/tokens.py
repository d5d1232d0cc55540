"""The contents of tokenizer files: tokens, scores or merges, and added tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gguf import TokenType


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched before BPE; special ones are not matched in text."""

    text: str
    id: int
    special: bool
    strips: bool = False
    """Whether it includes the white space before or after it, which GGUF cannot express."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a tokenizer; added tokens need not be in `ids`.

    Texts of byte-level BPE ("gpt2") use GPT-2's printable form of bytes (Ġ is a space), those of
    SentencePiece ("llama") ▁ for a space.
    """

    model: str
    """tokenizer.ggml.model."""
    pre: str
    """tokenizer.ggml.pre: the pre-tokenizer."""
    ids: dict[str, int]
    added: list[AddedToken]
    merges: list[str] = field(default_factory=list)
    """For gpt2, "left right" in order of rank."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """For llama: the merge to the piece of highest score is applied first."""
    types: Mapping[str, TokenType] = field(default_factory=dict)
    """Types of tokens that are not normal, without `added`."""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    """Default ids by GGUF name (bos, eos, unknown, padding)."""
    flags: Mapping[str, bool] = field(default_factory=dict)
    """tokenizer.ggml.{key}, such as add_space_prefix."""
    prefix_first: bool = False
    """Whether a space is put only before the first text: Metaspace with the scheme "first"."""
    template: tuple[list[str], list[str]] | None = None
    """Tokens that the tokenizer adds before and after a text, if its file has a template."""


def added_token(path: object, text: object, id: object, fields: Mapping[str, Any]) -> AddedToken:
    """An added token from the JSON file `path`. Raises ValueError if it is malformed."""
    special, lstrip, rstrip = (fields.get(key, False) for key in ("special", "lstrip", "rstrip"))
    if isinstance(text, str) and isinstance(id, int) and isinstance(special, bool):
        return AddedToken(text, id, special, strips=lstrip is True or rstrip is True)
    raise ValueError(f"{path}: malformed added token {text!r} with id {id!r}")
