"""Whether heavy hitters are tokens that often occur together with others (section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Window of co-occurrence in tokens to either side, and the fraction in the top set.
WINDOW = 5
TOP = 0.1


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


def associate(a: NDArray[np.float64], b: NDArray[np.float64], top: float = TOP) -> Association:
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
