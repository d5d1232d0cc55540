"""The tokenizer in a model's file (keys tokenizer.*)."""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.arguments import short

_log = logging.getLogger("h2o_cpp")


class EncodedPart(NamedTuple):
    """The tokens of a part of a text, and where the bytes of each end."""

    tokens: array[int]
    ends: NDArray[np.int32]


_NO_TEXT = np.zeros(1, np.int32)


class Tokenizer:
    """The tokenizer in a model's file; Generator.tokenizer returns it.

    path: the GGUF file.
    n_vocab: number of tokens in the vocabulary.
    bos, eos: the tokens at the beginning and end of a text, or None.
    end_tokens: frozenset of the tokens that end a text or a turn.
    ending: the tokens that the model expects after a text.
    special_texts: the texts of special tokens, which are ordinary text unless parsed.
    chat_template: Jinja2, or None.
    named_templates: further chat templates by name, such as "tool_use" and "rag".

    Methods raise ValueError for text that is not valid Unicode and for tokens that are not in the
    vocabulary.
    """

    def __init__(self, file: _core.GgufFile, n_vocab: int) -> None:
        """Raises ValueError for an unknown or damaged vocabulary."""
        self.core = _core.Tokenizer(file, n_vocab)
        self.path = file.path
        self.n_vocab = n_vocab
        self.bos = self.core.bos
        self.eos = self.core.eos
        self.end_tokens = frozenset(self.core.end_tokens)
        self.special_texts = self.core.special_texts
        self.chat_template = self.core.chat_template
        self.named_templates = self.core.named_templates
        self._beginning = self.core.beginning
        both = self.core.encode("", add_special=True, parse_special=False, begins=True, most=None)
        self.ending = both[len(self._beginning) :]
        self._encoded = _EncodedParts(self.core)

    @classmethod
    def of_model(cls, model: _core.Model) -> Tokenizer:
        """The tokenizer in a model's file; errors and warnings name the file."""
        path = model.file.path
        try:
            tokenizer = cls(model.file, model.n_vocab)
        except ValueError as error:
            raise ValueError(str(error) if path in str(error) else f"{path}: {error}") from None
        for warning in (*model.unused_parts, *tokenizer.core.warnings):
            _log.warning("%s: %s", path, warning)
        return tokenizer

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
        begins: `text` is the beginning, where some models add a space.
        most: raise ContextFullError for more tokens than this, without computing all of them.
        """
        if not isinstance(text, str):
            raise ValueError(f"text={short(text)}, expected a str")
        return self.core.encode(
            text, add_special=add_special, parse_special=parse_special, begins=begins, most=most
        )

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Tokens of two texts as BERT reads them: [CLS] first [SEP] second [SEP].

        RoBERTa's tokenizers, whose texts begin with <s>, have two separators between them.
        Raises ValueError for a tokenizer that puts no tokens around a text.
        """
        return next(self.encode_pairs(first, [second]))

    def encode_pairs(
        self, first: str, seconds: Iterable[str], *, most: int | None = None
    ) -> Iterator[list[int]]:
        """Tokens of a text with each of others: see encode_pair(); most: as for encode()."""
        if not self._beginning or not self.ending:
            missing = "after" if self._beginning else "before"
            raise ValueError(f"the tokenizer puts no token {missing} a text, expected a separator")
        before = self.encode(first, most=most)
        if self.token_text(self._beginning[0]) == "<s>":
            before += self.ending
        n_begin = len(self._beginning)
        rest = None if most is None else max(most - len(before) + n_begin, 0)
        for second in seconds:
            yield [*before, *self.encode(second, most=rest)[n_begin:]]

    def encode_chat(self, parts: Iterable[int | str], *, most: int | None = None) -> list[int]:
        """Tokens of a rendered conversation: beginning-of-text, then `parts`.

        most: as for encode(), without the tokens that begin a text.
        """
        return self.begun(self.encode_parts(parts, most=most))

    def begun(self, ids: list[int]) -> list[int]:
        """The tokens, with those that begin a text put first if they are missing."""
        return ids if ids[:1] == self._beginning else [*self._beginning, *ids]

    def encode_parts(
        self, parts: Iterable[int | str], *, begins: bool = True, most: int | None = None
    ) -> list[int]:
        """Tokens of parts that are tokens and texts; begins, most: as for encode()."""
        each = self.encode_each(parts, begins=begins, most=most)
        return [*chain.from_iterable(one.tokens for one in each)]

    def encode_each(
        self, parts: Iterable[int | str], *, begins: bool = True, most: int | None = None
    ) -> Iterator[EncodedPart]:
        """Tokens of each of the parts that encode_parts() takes."""
        for part in parts:
            if isinstance(part, int):
                one = EncodedPart(array("i", (part,)), _NO_TEXT)
                begins = True
            else:
                one = self._encoded.get(part, begins=begins, most=most)
                begins = False
            if most is not None:
                most = max(most - len(one.tokens), 0)
            yield one

    def split_special(self, text: str) -> list[int | str]:
        """Special tokens in `text` and the non-empty texts between them, in order."""
        return self.core.split_special(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`, without control tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.core.decode(tokens)

    def spell(self, tokens: Iterable[int]) -> str:
        """Text of `tokens` with that of special ones, and with the space that begins a text."""
        pieces = [self.token_bytes(token) or self.token_text(token).encode() for token in tokens]
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token: int, *, begins: bool = False) -> bytes:
        """The bytes of a token, possibly part of a character; empty for special tokens.

        begins: the token is the first of a text; omits the space added there.
        """
        return self.core.token_bytes(token, begins=begins)

    def byte_lengths(self, tokens: Iterable[int]) -> NDArray[np.int32]:
        """The numbers of bytes that token_bytes() has."""
        return self.core.byte_lengths(tokens)

    def has_text(self, tokens: Iterable[int]) -> bool:
        """Whether `tokens` have visible text."""
        return self.core.has_text(tokens)

    def token_text(self, token: int | None) -> str:
        """A token's text in the vocabulary; "" for None."""
        return "" if token is None else self.core.token_text(token)


class _EncodedParts:
    """Texts that were encoded last: the next turn of a conversation has all but the new ones."""

    _MOST = 1 << 21  # tokens, of 8 bytes, and characters, of which a token may have any number

    def __init__(self, core: _core.Tokenizer) -> None:
        self._core = core
        self._found: OrderedDict[tuple[str, bool], EncodedPart] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def get(self, text: str, *, begins: bool, most: int | None) -> EncodedPart:
        """The tokens of a text, without special ones around it; begins, most: as for encode()."""
        key = text, begins
        with self._lock:
            found = self._found.get(key)
            if found is not None and (most is None or len(found.tokens) <= most):
                self._found.move_to_end(key)
                return found
        tokens = self._core.encode(
            text, add_special=False, parse_special=False, begins=begins, most=most
        )
        ends = self._core.byte_lengths(tokens).cumsum(dtype=np.int32)
        found = EncodedPart(array("i", tokens), ends)
        with self._lock:
            if key not in self._found and _size(text, found) <= self._MOST // 16:
                self._found[key] = found
                self._size += _size(text, found)
            while self._size > self._MOST:
                (old, _), part = self._found.popitem(last=False)
                self._size -= _size(old, part)
        return found


def _size(text: str, part: EncodedPart) -> int:
    return len(text) + len(part.tokens)
