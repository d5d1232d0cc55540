"""Records: what is written down of a text while it is computed, beside the text itself."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.model.arguments import check_int

_N_ROWS = 64  # of logits that are looked at together; it bounds the memory


class TokenLogprob(NamedTuple):
    """How likely the model finds a token after those before it.

    Logarithms are natural, and of the model's own distribution: temperature, top_k and the other
    options of sampling have no part in it.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens with theirs, likeliest first


class Kept(NamedTuple):
    """What a sequence keeps of its text at one moment."""

    tokens_kept: int  # in the layer that keeps most
    shares: NDArray[np.float32]  # [tokens seen]: of all layers' KV heads, those that keep the token


class Record:
    """What Engine.submit is to write down of one text. It can be read at any time.

    Attributes: `logprobs`, of the tokens so far, which only grows; `kept`, what was kept when last
    looked at, None before.
    """

    def __init__(
        self, *, n_top: int | None = None, prompt: bool = False, kept_every: int | None = None
    ) -> None:
        """Nothing is written down unless it is asked for.

        n_top: log-probabilities of the generated tokens, and of this many of the likeliest at each.
        prompt: those of the prompt's tokens first, from its second on, as they are read: in chunks
            of n_batch, which see each other in full. That takes logits of [n_batch, n_vocab].
        kept_every: look at what is kept after the first generated token, then after so many more,
            and at the end. A look costs a call for each layer and KV head.

        Raises ValueError for numbers out of range.
        """
        self.n_top = None if n_top is None else check_int("n_top", n_top, 0)
        if prompt and n_top is None:
            raise ValueError("prompt=True needs n_top, how many of the likeliest tokens to note")
        self.prompt = prompt
        self.kept_every = None if kept_every is None else check_int("kept_every", kept_every, 1)
        self.logprobs: list[TokenLogprob] = []
        self.kept: Kept | None = None

    def tokens(self, logits: NDArray[np.float32], tokens: NDArray[np.int32]) -> None:
        """Write down tokens [n], each with the logits before it, [n, n_vocab]."""
        if self.n_top is None:
            return
        for begin in range(0, len(tokens), _N_ROWS):
            part = slice(begin, begin + _N_ROWS)
            self.logprobs += token_logprobs(logits[part], tokens[part], self.n_top)

    def look(self, model: _core.Model, session: _core.Session, sequence: int) -> None:
        """Write down what is kept now."""
        counts = np.zeros(session.tokens_seen(sequence), np.int32)
        for layer, kv_head in np.ndindex(model.n_layers, model.n_kv_heads):
            counts[session.kept(layer, kv_head, sequence)[0]] += 1
        shares = (counts / (model.n_layers * model.n_kv_heads)).astype(np.float32)
        self.kept = Kept(session.tokens_kept(sequence), shares)


def token_logprobs(
    logits: NDArray[np.float32], tokens: NDArray[np.int32], n_top: int
) -> list[TokenLogprob]:
    """Of tokens [n], each under the softmax of its row of logits [n, n_vocab]."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return [
        TokenLogprob(int(token), float(row[token]), _likeliest(row, n_top))
        for row, token in zip(rows, tokens, strict=True)
    ]


def _likeliest(row: NDArray[np.float64], n: int) -> tuple[tuple[int, float], ...]:
    n = min(n, len(row))
    some = np.argpartition(-row, n - 1)[:n] if n else np.zeros(0, np.intp)
    return tuple((int(i), float(row[i])) for i in sorted(some, key=lambda i: (-row[i], i)))
