"""Whether heavy hitters are the tokens that occur often together with others (section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Tokens to either side that count as together, and the share of all that are the top ones.
WINDOW = 5
TOP = 0.1


@dataclass(frozen=True)
class Association:
    """How two measures of the same items go together."""

    spearman: float  # rank correlation; nan where one measure is constant
    overlap: float  # of the top sets, as a share of either
    overlap_by_chance: float  # of random sets of that size


def cooccurrences(tokens: Sequence[int], window: int = WINDOW) -> NDArray[np.float64]:
    """For each position, how often its token is within `window` of a different one: [n].

    Counted over the whole text for the token's id, so equal for all places of one token.
    """
    ids, inverse = np.unique(np.asarray(tokens, np.int64), return_inverse=True)
    counts = np.zeros(len(ids))
    for distance in range(1, window + 1):
        left, right = inverse[:-distance], inverse[distance:]
        different = left != right
        for side in (left, right):
            counts += np.bincount(side[different], minlength=len(ids))
    return counts[inverse]


def associate(a: NDArray[np.float64], b: NDArray[np.float64], top: float = TOP) -> Association:
    """Association of two measures [n] of n >= 2 items, each with a top set of top * n items."""
    k = max(1, int(top * len(a)))
    overlap = float(_top_weights(a, k) @ _top_weights(b, k)) / k
    return Association(spearman(a, b), overlap, k / len(a))


def spearman(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Spearman's rank correlation, ties at their mean rank; nan where one of them is constant."""
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
    """1 for the k largest, 0 for others; items tied for the last places share them equally."""
    limit = np.sort(values)[-k]
    above, tied = values > limit, values == limit
    weights: NDArray[np.float64] = above + tied * ((k - above.sum()) / tied.sum())
    return weights
