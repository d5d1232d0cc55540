"""How sparse attention is (arXiv 2306.14048, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

# An entry counts as zero below this share of the largest of its row, as in the paper.
THRESHOLD = 0.01


def sparsity(
    rows: Iterable[NDArray[np.float64]], threshold: float = THRESHOLD
) -> NDArray[np.float64]:
    """For each layer, the share of a row that is below `threshold` of its largest entry.

    rows [n_layers, n_kv_heads, tokens so far], one for each token; entries that a causal mask hides
    are not there and do not count. The mean over rows and heads, each row counting once.
    Raises ValueError without rows.
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
