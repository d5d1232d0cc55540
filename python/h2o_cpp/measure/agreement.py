"""How often a cache predicts the same as the full one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from h2o_cpp import _core
from h2o_cpp.measure.windows import windows
from h2o_cpp.model.session import chunks


class Agreement(NamedTuple):
    """Means over the tokens of a text, from 0 to 1."""

    same: float  # share of predictions with the same most likely token
    overlap: float  # sum of min(p, q) over the vocabulary: 1 minus the total variation distance


def agreement_of(
    full: _core.Session,
    session: _core.Session,
    tokens: Sequence[int],
    *,
    beginning: Sequence[int] = (),
) -> Agreement:
    """Read a text with both caches, in windows as perplexity() does, and compare predictions.

    full, session: of the same model, n_ctx and n_batch.
    """
    same, overlap, n = 0, 0.0, 0
    for window in windows(tokens, session.n_ctx, beginning=beginning):
        full.reset(0)
        session.reset(0)
        for fed in chunks(session, window[:-1]):
            p, q = full.score(0, fed), session.score(0, fed)
            same += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
            for row in (p, q):
                row -= row.max(axis=1, keepdims=True)
                np.exp(row, out=row)
                row /= row.sum(axis=1, keepdims=True)
            overlap += float(np.minimum(p, q).sum(dtype=np.float64))
            n += len(fed)
    return Agreement(same / n, overlap / n)
