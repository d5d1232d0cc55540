"""Where the messages of a rendered conversation are in its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from sys import maxsize

import numpy as np
from numpy.typing import NDArray

from h2o_cpp.model.marked_text import MESSAGE, runs
from h2o_cpp.model.tokenizer import EncodedPart, Tokenizer

_NONE = 0, maxsize, maxsize

Places = tuple[tuple[int, int], ...]  # parts of a conversation's tokens: where each begins and ends


def message_places(
    rendered: str,
    n_messages: int,
    parts: Sequence[int | str],
    encoded: Sequence[EncodedPart],
    tokenizer: Tokenizer,
    *,
    begin: int = 0,
) -> list[Places]:
    """For each message, the tokens that have a part of its text.

    rendered: a marked text, of which `parts` are the special tokens and the text between them.
    begin: the number of tokens before those.

    Where the tokenizer changes a text by more than a space at the beginning, as for unknown words,
    places are those in proportion.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in range(n_messages)]
    messages = _messages(rendered)
    number, first, last = next(messages, _NONE)  # its next text, in characters
    at = 0  # of the part
    for part, (tokens, ends) in zip(parts, encoded, strict=True):
        if isinstance(part, int):
            special = tokenizer.token_text(part)
            at += len(special) if rendered.startswith(special, at) else 0
            begin += 1
            continue
        at = max(rendered.find(part, at), at)  # a special token may have taken spaces
        end = at + len(part)
        offsets = _Offsets(part, ends)
        while first < end:
            if last > at:
                place = offsets.tokens(max(first - at, 0), min(last, end) - at)
                if place[0] < place[1]:
                    found[number].append((begin + place[0], begin + place[1]))
            if last > end:
                break  # it goes on in the next part
            number, first, last = next(messages, _NONE)
        at = end
        begin += len(tokens)
    return [*map(tuple, found)]


def _messages(rendered: str) -> Iterator[tuple[int, int, int]]:
    """The number of a message, and where a part of its text begins and ends, in characters."""
    found = runs(rendered)
    ends = accumulate(length for _, length in found)
    for (origin, length), end in zip(found, ends, strict=True):
        if origin >= MESSAGE:
            yield origin - MESSAGE, end - length, end


class _Offsets:
    """The tokens at ascending places in a text."""

    def __init__(self, text: str, ends: NDArray[np.int32]) -> None:
        """ends: where the tokens end, in bytes of their own text."""
        self._text, self._ends = text, ends
        self._n_characters = self._n_bytes = 0
        n, n_tokens = len(text.encode()), int(ends[-1]) if len(ends) else 0
        self._shift, self._scale = n_tokens - n, 1.0
        if self._shift not in (0, 1):
            self._shift, self._scale = 0, n_tokens / max(n, 1)

    def tokens(self, begin: int, end: int) -> tuple[int, int]:
        """Where the tokens begin and end that have a part of the text from `begin` to `end`."""
        first = int(self._ends.searchsorted(self._place(begin), "right"))
        last = int(self._ends.searchsorted(self._place(end), "left")) + 1
        return first, min(last, len(self._ends))

    def _place(self, character: int) -> float:
        """The bytes of the tokens' text before a character."""
        self._n_bytes += len(self._text[self._n_characters : character].encode())
        self._n_characters = character
        return self._n_bytes * self._scale + self._shift
