"""TextTokenizer: one interface to every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from h2o_cpp import _core
from h2o_cpp.tokenizer.byte_pairs import BytePairs
from h2o_cpp.tokenizer.metadata import Metadata, get
from h2o_cpp.tokenizer.sentence_pieces import SentencePieces
from h2o_cpp.tokenizer.special_tokens import SpecialTokens
from h2o_cpp.tokenizer.vocabulary import Vocabulary, add_eos


class _Kind(Protocol):
    """What differs from one kind of tokenizer to the next: text without special tokens."""

    @property
    def vocabulary(self) -> Vocabulary: ...
    @property
    def add_bos(self) -> bool: ...  # whether a text begins with the token bos
    @property
    def begins_with_space(self) -> bool: ...  # whether a space is put in front of a text
    @property
    def bytes(self) -> Sequence[bytes]: ...  # of each token; none for special ones
    def encode(self, text: str, *, begins: bool) -> list[int]: ...


_KINDS: dict[str, Callable[[Metadata, int], _Kind]] = {"gpt2": BytePairs, "llama": SentencePieces}


class TextTokenizer:
    """Text to tokens and back, by the keys tokenizer.* of a GGUF file.

    Attributes: `bos` and `eos`, tokens or None; `end_tokens`, any of which ends a turn;
    `special`, the tokens that have no text; `chat_template`, Jinja2 or None.

    Raises ValueError for a vocabulary it does not know how to use.
    """

    def __init__(self, metadata: Metadata, n_vocab: int) -> None:
        model = get(metadata, "tokenizer.ggml.model", str)
        if model not in _KINDS:
            supported = ", ".join(map(repr, _KINDS))
            raise ValueError(f"tokenizer.ggml.model is {model!r}, supported: {supported}")
        self._kind = _KINDS[model](metadata, n_vocab)
        vocabulary = self._kind.vocabulary
        self.bos = vocabulary.bos
        self.eos = vocabulary.eos
        self.end_tokens = vocabulary.end_tokens
        self.special = SpecialTokens(vocabulary.special())
        self.chat_template: str | None = get(metadata, "tokenizer.chat_template", str, None)
        self._tokens = vocabulary.tokens
        self._before = _added(self._kind.add_bos, "bos", self.bos)
        self._after = _added(add_eos(metadata), "eos", self.eos)

    @classmethod
    def of_model(cls, model: _core.Model) -> TextTokenizer:
        """The tokenizer in a model's file, which errors name."""
        try:
            return cls(model.file.metadata(), model.n_vocab)
        except ValueError as error:
            raise ValueError(f"{model.file.path}: {error}") from None

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        begins: bool = True,
    ) -> list[int]:
        """Tokens of `text`.

        add_special: with the tokens that the model wants at the beginning and the end of a text.
        parse_special: special tokens that `text` spells are those tokens instead of text.
        begins: it does not continue another text, so a space may belong in front.
        """
        parts = self.special.split(text) if parse_special else [text]
        ids = self.encode_parts(parts, begins=begins)
        return [*self._before, *ids, *self._after] if add_special else ids

    def encode_chat(self, parts: Iterable[int | str]) -> list[int]:
        """A conversation as a template wrote it: begins as a text does, and does not end."""
        ids = self.encode_parts(parts)
        return ids if ids[:1] == self._before else [*self._before, *ids]

    def encode_parts(self, parts: Iterable[int | str], *, begins: bool = True) -> list[int]:
        """Tokens of a text given as tokens and strings; begins: it does not continue another."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                begins = True
                continue
            try:
                part.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"text is not valid Unicode: {error.reason}") from None
            ids += self._kind.encode(part, begins=begins)
            begins = False
        return ids

    def token_bytes(self, token: int, *, begins: bool = False) -> bytes:
        """The bytes of a token: part of a character, or several; none for special tokens.

        begins: it is the first with any bytes, so without the space put in front of a text.
        """
        data = self._kind.bytes[token]
        return data.removeprefix(b" ") if begins and self._kind.begins_with_space else data

    def has_text(self, tokens: Iterable[int]) -> bool:
        """Whether a text has begun with `tokens`."""
        return any(map(self.token_bytes, tokens))

    def token_text(self, token: int | None) -> str:
        """How the vocabulary spells a token."""
        return "" if token is None else self._tokens[token]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`; bytes that are not UTF-8 become U+FFFD."""
        data = b"".join(map(self.token_bytes, tokens))
        if self._kind.begins_with_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")


def _added(add: bool, name: str, token: int | None) -> list[int]:
    if not add:
        return []
    if token is None:
        raise ValueError(f"tokenizer.ggml.add_{name}_token is true but {name}_token_id is missing")
    return [token]
