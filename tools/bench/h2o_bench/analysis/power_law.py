"""Whether a few tokens receive most of the attention (arXiv 2306.14048, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Shares of the tokens, the heaviest first, whose part of the attention is reported.
TOP = (0.05, 0.1, 0.2)
# The line is fitted to these ranks, as shares of the tokens: not to the first few, which are
# attention sinks, nor to the newest tokens at the end, which have had no time to receive anything.
_FITTED = (0.01, 0.5)
LEAST_TOKENS = 20  # that a power law can be seen in


@dataclass(frozen=True)
class PowerLaw:
    """Accumulated attention by rank: score(rank) ~ rank ** -exponent."""

    top_shares: tuple[float, ...]  # of all attention, for each of TOP
    exponent: float
    r_squared: float  # of the line on logarithmic axes: 1 is an exact power law


def ranked(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores [n_heads, n] sorted in each head, largest first, and averaged over heads: [n]."""
    mean: NDArray[np.float64] = -np.sort(-scores, axis=-1).mean(axis=0)
    return mean


def power_law(by_rank: NDArray[np.float64]) -> PowerLaw:
    """Top shares, and the least-squares line through log score against log rank.

    by_rank [n] is descending; the line goes through ranks n / 100 to n / 2, each
    counting alike. Raises ValueError for fewer than 20 tokens.
    """
    n = len(by_rank)
    if n < LEAST_TOKENS:
        raise ValueError(f"{n} tokens, expected at least {LEAST_TOKENS}")
    cumulative = np.cumsum(by_rank) / by_rank.sum()
    top_shares = tuple(float(cumulative[int(share * n) - 1]) for share in TOP)
    first, last = int(_FITTED[0] * n), int(_FITTED[1] * n)
    x = np.log(np.arange(first + 1, last + 1))
    y = np.log(np.maximum(by_rank[first:last], np.finfo(np.float32).tiny))  # it may underflow
    x -= x.mean()
    y -= y.mean()
    slope = float(x @ y / (x @ x))
    # A flat line explains scores that are all the same.
    r_squared = slope**2 * float(x @ x) / float(y @ y) if y.any() else 1.0
    return PowerLaw(top_shares, -slope, r_squared)
