"""The sparsity of attention (arXiv 2306.14048, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

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
