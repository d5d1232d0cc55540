"""Text to tokens and back, by the vocabulary in a model's file (keys tokenizer.*)."""

from __future__ import annotations

from collections.abc import Iterable

from h2o_cpp import _core
from h2o_cpp.model.arguments import short


class Tokenizer:
    """The tokenizer in a model's file; Generator.tokenizer returns it.

    n_vocab: number of tokens in the vocabulary.
    bos, eos: the tokens at the beginning and end of a text, or None.
    end_tokens: frozenset of the tokens that end a text or a turn.
    special_texts: the spellings of special tokens, which are ordinary text unless parsed.
    chat_template: Jinja2, or None.

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

        add_special: add the tokens that the model expects around a text, such as beginning-of-text.
        parse_special: parse special tokens in `text`, such as "</s>".
        begins: `text` does not continue another, so some models put a space in front of it.
        most: raise ContextFullError for more tokens than this, without making all of them.
        """
        if not isinstance(text, str):
            raise ValueError(f"text={short(text)}, expected a str")
        return self.core.encode(
            text, add_special=add_special, parse_special=parse_special, begins=begins, most=most
        )

    def encode_chat(self, parts: Iterable[int | str], *, most: int | None = None) -> list[int]:
        """Tokens of a conversation that a template wrote: those that begin a text, then `parts`.

        most: as for encode(), not counting the tokens that begin a text.
        """
        ids = self.encode_parts(parts, most=most)
        return ids if ids[:1] == self._beginning else [*self._beginning, *ids]

    def encode_parts(
        self, parts: Iterable[int | str], *, begins: bool = True, most: int | None = None
    ) -> list[int]:
        """Tokens of a text given as tokens and texts; begins, most: as for encode()."""
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
        """`text` as the special tokens in it and the non-empty texts between them, in order."""
        return self.core.split_special(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`, without control tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.core.decode(tokens)

    def token_bytes(self, token: int, *, begins: bool = False) -> bytes:
        """The bytes of a token, which may be part of a character; none for special tokens.

        begins: it is the first of a text, so the space put in front of a text is left out.
        """
        return self.core.token_bytes(token, begins=begins)

    def has_text(self, tokens: Iterable[int]) -> bool:
        """Whether a text has begun with `tokens`."""
        return self.core.has_text(tokens)

    def token_text(self, token: int | None) -> str:
        """How the vocabulary spells a token; "" for None."""
        return "" if token is None else self.core.token_text(token)
