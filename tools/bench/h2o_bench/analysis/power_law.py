"""Whether few tokens receive most of the attention (arXiv 2306.14048, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
