"""Looks: observations of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import Generator, Policy, Stats
from h2o_cpp.measure.inspection import VisiblePieces


@dataclass(frozen=True)
class Look:
    """The cache at one moment."""

    stats: Stats
    n_recent: int | None  # newest tokens, kept regardless of scores; None: all
    begin: int  # the first token that was in no earlier look
    pieces: Sequence[str]  # printable texts from that token on
    shares: NDArray[np.float32]  # [tokens seen], share of all KV heads that keep each token
    tokens_per_second: float  # of the current output; 0 without one


class Looks:
    """Observes a Generator's cache while it reads one text."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._pieces = VisiblePieces(generator.tokenizer)
        self._n_pieces = 0

    def take(self, tokens: Sequence[int], tokens_per_second: float) -> Look:
        """Observe the cache.

        tokens: of the text, at least as many as the cache has seen.
        """
        generator, stats = self._generator, self._generator.stats()
        policy = generator.policy
        n, begin = stats.tokens_seen, self._n_pieces
        counts = np.zeros(n, np.int32)
        n_heads = 0
        for layer, kv_head in np.ndindex(stats.n_layers, stats.n_kv_heads):
            kept = generator.kept(layer, kv_head)[0]
            counts[kept] += 1
            n_heads += len(kept) > 0  # layers with a recurrent state keep no tokens
        self._n_pieces = max(begin, n)
        return Look(
            stats=stats,
            n_recent=policy.n_recent if isinstance(policy, Policy) else policy[0].n_recent,
            begin=begin,
            pieces=[self._pieces.push(token) for token in tokens[begin:n]],
            shares=(counts / max(n_heads, 1)).astype(np.float32),
            tokens_per_second=tokens_per_second,
        )
