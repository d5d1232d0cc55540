"""The attention that each token of a text receives: row by row, and added up.

Of a model with grouped queries, an attention row is the sum over the query heads that share a KV
head, which is what H2O's scores are made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.policy import Policy
from h2o_cpp.session import open_session

_CHUNK = 256  # tokens read at a time where the order of reading makes no difference


def attention_rows(
    model: _core.Model, tokens: Sequence[int], *, kv_dtype: str = "f16"
) -> Iterator[NDArray[np.float64]]:
    """For each token of a text, the attention it gives: [n_layers, n_kv_heads, tokens so far]."""
    n = len(tokens)
    session = open_session(
        model, Policy.h2o(heavy=n, recent=1), n_ctx=n, n_batch=1, kv_dtype=kv_dtype
    )
    before = np.zeros((model.n_layers, model.n_kv_heads, 0))
    for token in tokens:
        session.step([(0, np.array([token], np.int32))])
        scores = _scores(model, session)
        row = scores.copy()
        row[:, :, :-1] -= before
        yield row
        before = scores


def accumulated_attention(
    model: _core.Model, tokens: Sequence[int], *, kv_dtype: str = "f16"
) -> NDArray[np.float64]:
    """The attention each token has received at the end: H2O's scores [n_layers, n_kv_heads, n]."""
    n = len(tokens)
    session = open_session(
        model, Policy.h2o(heavy=n, recent=1), n_ctx=n, n_batch=min(n, _CHUNK), kv_dtype=kv_dtype
    )
    for begin in range(0, n, _CHUNK):
        session.step([(0, np.asarray(tokens[begin : begin + _CHUNK], np.int32))])
    return _scores(model, session)


def uniform_attention(n: int) -> NDArray[np.float64]:
    """What each of n tokens receives if every token attends to all up to itself alike.

    Token j gets the sum of 1 / (i + 1) for i from j to n - 1: the older, the more.
    """
    return np.cumsum(1 / np.arange(n, 0, -1))[::-1]


def _scores(model: _core.Model, session: _core.Session) -> NDArray[np.float64]:
    """The scores of a session that has evicted nothing, by position."""
    heads = range(model.n_kv_heads)
    return np.array(
        [[session.kept(layer, head, 0)[1] for head in heads] for layer in range(model.n_layers)],
        np.float64,
    )
