"""Where the messages of a rendered conversation are in its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from sys import maxsize

import numpy as np

from h2o_cpp.model.marked_text import MESSAGE, runs
from h2o_cpp.model.tokenizer import Tokenizer

_NONE = 0, maxsize, maxsize

Places = tuple[tuple[int, int], ...]  # parts of a conversation's tokens: where each begins and ends


def message_places(
    rendered: str,
    n_messages: int,
    parts: Sequence[int | str],
    tokens: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    *,
    begin: int = 0,
) -> list[Places]:
    """For each message, the tokens that have a part of its text.

    rendered: a marked text, of which `parts` are the special tokens and the text between them, and
        `tokens` the tokens of each part.
    begin: the number of tokens before those.

    Where the tokenizer changes a text by more than a space at the beginning, as for unknown words,
    places are those in proportion.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in range(n_messages)]
    messages = _messages(rendered)
    number, first, last = next(messages, _NONE)  # its next text, in characters
    at = 0  # of the part
    for part, ids in zip(parts, tokens, strict=True):
        if isinstance(part, int):
            special = tokenizer.token_text(part)
            at += len(special) if rendered.startswith(special, at) else 0
            begin += 1
            continue
        at = max(rendered.find(part, at), at)  # a special token may have taken spaces
        end = at + len(part)
        offsets = _Offsets(part, ids, tokenizer)
        while first < end:
            if last > at:
                place = offsets.tokens(max(first - at, 0), min(last, end) - at)
                if place[0] < place[1]:
                    found[number].append((begin + place[0], begin + place[1]))
            if last > end:
                break  # it goes on in the next part
            number, first, last = next(messages, _NONE)
        at = end
        begin += len(ids)
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

    def __init__(self, text: str, tokens: Sequence[int], tokenizer: Tokenizer) -> None:
        self._text = text
        self._n_characters = self._n_bytes = 0
        ends = tokenizer.byte_lengths(tokens).cumsum()
        n, n_tokens = len(text.encode()), int(ends[-1:].sum())
        if n_tokens - n in (0, 1):
            self._ends = ends - (n_tokens - n)
        else:
            self._ends = ends * (n / max(n_tokens, 1))
        self._begins = np.concatenate(([0], self._ends[:-1]))

    def tokens(self, begin: int, end: int) -> tuple[int, int]:
        """Where the tokens begin and end that have a part of the text from `begin` to `end`."""
        first = int(np.searchsorted(self._ends, self._bytes_before(begin), side="right"))
        return first, int(np.searchsorted(self._begins, self._bytes_before(end), side="left"))

    def _bytes_before(self, place: int) -> int:
        self._n_bytes += len(self._text[self._n_characters : place].encode())
        self._n_characters = place
        return self._n_bytes
