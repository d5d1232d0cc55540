"""A tokenizer as its files describe it: tokens, their scores or merges, and added tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gguf import TokenType


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched as a whole, before BPE; a special one is never produced by text."""

    text: str
    id: int
    special: bool


@dataclass(frozen=True)
class Tokens:
    """The tokens of one tokenizer; the texts of added tokens need not be in `ids`.

    Of byte-level BPE ("gpt2") the texts are in GPT-2's visible form of bytes (Ġ for a space), of
    SentencePiece ("llama") they have ▁ for a space.
    """

    model: str
    """tokenizer.ggml.model."""
    pre: str
    """tokenizer.ggml.pre: how text is cut before BPE."""
    ids: dict[str, int]
    added: list[AddedToken]
    merges: list[str] = field(default_factory=list)
    """For gpt2, "left right" in order of rank."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """For llama: of the merges that two neighbours allow, the one to the best score is made."""
    types: Mapping[str, TokenType] = field(default_factory=dict)
    """Types of the tokens that are not normal, apart from what `added` says."""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    """Ids by GGUF name (bos, eos, unknown, padding), unless HF's files say otherwise."""
    flags: Mapping[str, bool] = field(default_factory=dict)
    """tokenizer.ggml.{key}, such as add_space_prefix."""
    template: tuple[list[str], list[str]] | None = None
    """Tokens that the tokenizer puts before and after a text, if its file says so."""


def added_token(path: object, text: object, id: object, special: object) -> AddedToken:
    """An added token from the JSON file `path`; raises ValueError unless it is well formed."""
    if isinstance(text, str) and isinstance(id, int) and isinstance(special, bool):
        return AddedToken(text, id, special)
    raise ValueError(f"{path}: malformed added token {text!r} with id {id!r}")
