"""The attention that tokens receive, row by row and accumulated.

With grouped queries, a row is the sum over the query heads of a KV head, as in H2O's scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.model.policy import Policy
from h2o_cpp.model.session import chunks, open_session

_N_BATCH = 256  # tokens per chunk, without effect on the result


def attention_rows(
    model: _core.Model, tokens: Sequence[int], *, kv_dtype: str = "f16"
) -> Iterator[NDArray[np.float64]]:
    """The attention row of each token: [n_layers, n_kv_heads, tokens so far]."""
    n = len(tokens)
    # With decay 0, scores are the attention of the newest token.
    policy = Policy.h2o(heavy=n, recent=1, decay=0)
    session = open_session(model, policy, n_ctx=n, n_batch=1, kv_dtype=kv_dtype)
    for token in tokens:
        session.step([(0, np.array([token], np.int32))])
        yield _scores(model, session)


def accumulated_attention(
    model: _core.Model, tokens: Sequence[int], *, kv_dtype: str = "f16"
) -> NDArray[np.float64]:
    """The accumulated attention of each token: H2O's scores [n_layers, n_kv_heads, n]."""
    n = len(tokens)
    policy = Policy.h2o(heavy=n, recent=1)
    session = open_session(model, policy, n_ctx=n, n_batch=_N_BATCH, kv_dtype=kv_dtype)
    for chunk in chunks(session, np.asarray(tokens, np.int32)):
        session.step([(0, chunk)])
    return _scores(model, session)


def uniform_attention(n: int) -> NDArray[np.float64]:
    """The accumulated attention of n tokens if every token attends uniformly.

    Token j receives the sum of 1 / (i + 1) for i from j to n - 1.
    """
    return np.cumsum(1 / np.arange(n, 0, -1))[::-1]


def _scores(model: _core.Model, session: _core.Session) -> NDArray[np.float64]:
    """Scores by position, in a session without evictions."""
    heads = range(model.n_kv_heads)
    return np.array(
        [[session.kept(layer, head, 0)[1] for head in heads] for layer in range(model.n_layers)],
        np.float64,
    )
