"""The observations of the H2O paper (arXiv 2306.14048, section 3): attention that tokens receive.

With grouped queries, a row of attention is the sum over the query heads of a KV head, as in H2O's
scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.budget.policy import Policy
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


# An entry counts as zero below this fraction of its row's maximum, as in the paper.
THRESHOLD = 0.01


def sparsity(
    rows: Iterable[NDArray[np.float64]], threshold: float = THRESHOLD
) -> NDArray[np.float64]:
    """For each layer, the mean fraction of a row below `threshold` of its maximum.

    rows [n_layers, n_kv_heads, tokens so far], one per token; entries hidden by the causal mask do
    not count. Raises ValueError without rows.
    """
    total, n = np.zeros(0), 0
    for row in rows:
        small = row < threshold * row.max(axis=-1, keepdims=True)
        share = small.mean(axis=(1, 2))
        total = share if n == 0 else total + share
        n += 1
    if n == 0:
        raise ValueError("no rows of attention, expected at least 1")
    return total / n


# Fractions of the tokens, largest scores first, whose share of attention is reported.
TOP = (0.05, 0.1, 0.2)
# Ranks of the fitted line, as fractions: without the first ones, which are attention sinks, and the
# last, newest tokens, which had no time to receive attention.
_FITTED = (0.01, 0.5)
LEAST_TOKENS = 20  # least tokens to fit


@dataclass(frozen=True)
class PowerLaw:
    """Accumulated attention by rank: score(rank) ~ rank ** -exponent."""

    top_shares: tuple[float, ...]  # share of all attention for each of TOP
    exponent: float
    r_squared: float  # of the line on logarithmic axes; 1 is an exact power law


def ranked(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores [n_heads, n] sorted in each head, descending, and averaged over heads: [n]."""
    mean: NDArray[np.float64] = -np.sort(-scores, axis=-1).mean(axis=0)
    return mean


def power_law(by_rank: NDArray[np.float64]) -> PowerLaw:
    """Top shares, and the least-squares line of log score against log rank.

    by_rank [n] is descending; the line is fitted to ranks n / 100 to n / 2 with equal weights.
    Raises ValueError for fewer than 20 tokens.
    """
    n = len(by_rank)
    if n < LEAST_TOKENS:
        raise ValueError(f"{n} tokens, expected at least {LEAST_TOKENS}")
    cumulative = np.cumsum(by_rank) / by_rank.sum()
    top_shares = tuple(float(cumulative[int(share * n) - 1]) for share in TOP)
    first, last = int(_FITTED[0] * n), int(_FITTED[1] * n)
    x = np.log(np.arange(first + 1, last + 1))
    y = np.log(np.maximum(by_rank[first:last], np.finfo(np.float32).tiny))  # may underflow
    x -= x.mean()
    y -= y.mean()
    slope = float(x @ y / (x @ x))
    # A flat line fits constant scores.
    r_squared = slope**2 * float(x @ x) / float(y @ y) if y.any() else 1.0
    return PowerLaw(top_shares, -slope, r_squared)


# Window of co-occurrence in tokens to either side, and the fraction in the top set.
WINDOW = 5
_TOP = 0.1


@dataclass(frozen=True)
class Association:
    """The association of two measures of the same items."""

    spearman: float  # rank correlation; nan if a measure is constant
    overlap: float  # overlap of the top sets, as a fraction
    overlap_by_chance: float  # overlap of random sets of this size


def cooccurrences(tokens: Sequence[int], window: int = WINDOW) -> NDArray[np.float64]:
    """For each position, how often its token is within `window` of a different one: [n].

    Counted for the token's id over the whole text.
    """
    ids, inverse = np.unique(np.asarray(tokens, np.int64), return_inverse=True)
    counts = np.zeros(len(ids))
    for distance in range(1, window + 1):
        left, right = inverse[:-distance], inverse[distance:]
        different = left != right
        for side in (left, right):
            counts += np.bincount(side[different], minlength=len(ids))
    return counts[inverse]


def associate(a: NDArray[np.float64], b: NDArray[np.float64], top: float = _TOP) -> Association:
    """The association of two measures [n], n >= 2; top sets have top * n items."""
    k = max(1, int(top * len(a)))
    overlap = float(_top_weights(a, k) @ _top_weights(b, k)) / k
    return Association(spearman(a, b), overlap, k / len(a))


def spearman(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Spearman's rank correlation, with mean ranks for ties; nan if a measure is constant."""
    x, y = _ranks(a), _ranks(b)
    x -= x.mean()
    y -= y.mean()
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm > 0 else float("nan")


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean_ranks: NDArray[np.float64] = ends - (counts - 1) / 2
    return mean_ranks[inverse]


def _top_weights(values: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """1 for the k largest items, 0 for others; ties for the last places share them equally."""
    limit = np.sort(values)[-k]
    above, tied = values > limit, values == limit
    weights: NDArray[np.float64] = above + tied * ((k - above.sum()) / tied.sum())
    return weights
