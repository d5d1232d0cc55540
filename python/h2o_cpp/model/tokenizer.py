"""Text to tokens and back, by the vocabulary in a model's file (keys tokenizer.*)."""

from __future__ import annotations

from collections.abc import Iterable

from h2o_cpp import _core
from h2o_cpp.model.arguments import short


class Tokenizer:
    """The tokenizer of the C++ core.

    Attributes: `n_vocab`; `bos` and `eos`, tokens or None; `end_tokens`, any of which ends a turn;
    `special_texts`, which text spells without becoming those tokens; `chat_template`, Jinja2 or
    None.

    Methods raise ValueError for text that is not valid Unicode and for tokens that are not in the
    vocabulary.
    """

    def __init__(self, file: _core.GgufFile, n_vocab: int) -> None:
        """Raises ValueError for a vocabulary of an unknown kind or that is damaged."""
        self.core = _core.Tokenizer(file, n_vocab)
        self.n_vocab = n_vocab
        self.bos = self.core.bos
        self.eos = self.core.eos
        self.end_tokens = frozenset(self.core.end_tokens)
        self.special_texts = self.core.special_texts
        self.chat_template = self.core.chat_template
        self._beginning = self.core.beginning

    @classmethod
    def of_model(cls, model: _core.Model) -> Tokenizer:
        """The tokenizer in a model's file, which errors name."""
        try:
            return cls(model.file, model.n_vocab)
        except ValueError as error:
            path = model.file.path
            raise ValueError(str(error) if path in str(error) else f"{path}: {error}") from None

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        begins: bool = True,
        most: int | None = None,
    ) -> list[int]:
        """Tokens of `text`.

        add_special: with the tokens that the model wants at the beginning and the end of a text.
        parse_special: special tokens that `text` spells are those tokens instead of text.
        begins: it does not continue another text, so a space may belong in front.
        most: raise ContextFullError for more tokens, which takes less time than reading them all.
        """
        if not isinstance(text, str):
            raise ValueError(f"text={short(text)}, expected a str")
        return self.core.encode(
            text, add_special=add_special, parse_special=parse_special, begins=begins, most=most
        )

    def encode_chat(self, parts: Iterable[int | str], *, most: int | None = None) -> list[int]:
        """A conversation as a template wrote it: begins as a text does, and does not end.

        most: as for encode(), but for the tokens that a text begins with.
        """
        ids = self.encode_parts(parts, most=most)
        return ids if ids[:1] == self._beginning else [*self._beginning, *ids]

    def encode_parts(
        self, parts: Iterable[int | str], *, begins: bool = True, most: int | None = None
    ) -> list[int]:
        """Tokens of a text given as tokens and texts; begins: it does not continue another."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                begins = True
            else:
                left = None if most is None else max(most - len(ids), 0)
                ids += self.encode(part, add_special=False, begins=begins, most=left)
                begins = False
        return ids

    def split_special(self, text: str) -> list[int | str]:
        """The special tokens that `text` spells, and the texts between them that are not empty."""
        return self.core.split_special(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`; bytes that are not UTF-8 become U+FFFD."""
        return self.core.decode(tokens)

    def token_bytes(self, token: int, *, begins: bool = False) -> bytes:
        """The bytes of a token: part of a character, or several; none for special tokens.

        begins: it is the first with any bytes, so without the space put in front of a text.
        """
        return self.core.token_bytes(token, begins=begins)

    def has_text(self, tokens: Iterable[int]) -> bool:
        """Whether a text has begun with `tokens`."""
        return self.core.has_text(tokens)

    def token_text(self, token: int | None) -> str:
        """How the vocabulary spells a token; "" for None."""
        return "" if token is None else self.core.token_text(token)
