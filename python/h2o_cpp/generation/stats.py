"""Statistics of caches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core


@dataclass(frozen=True)
class HeadStats:
    """The tokens that one KV head keeps."""

    oldest: int  # lowest kept position; -1 before any token
    heaviest: int  # position with the largest score, the first of equals; -1 without scores
    score: float  # sum of the kept tokens' scores

    @staticmethod
    def of(positions: NDArray[np.int32], scores: NDArray[np.float32]) -> HeadStats:
        """Makes it from the kept positions, ascending, and their scores."""
        return HeadStats(
            oldest=int(positions[0]) if len(positions) else -1,
            heaviest=int(positions[scores.argmax()]) if scores.any() else -1,
            score=float(scores.sum(dtype=np.float64)),
        )


@dataclass(frozen=True)
class LayerStats:
    """The tokens that one layer keeps."""

    tokens_kept: int  # per KV head; 0 in a layer without a KV cache
    evictions: int  # 0 in such a layer
    heads: tuple[HeadStats, ...]

    @staticmethod
    def of(model: _core.Model, session: _core.Session, sequence: int, layer: int) -> LayerStats:
        """Reads those of a layer of a sequence."""
        kept = session.tokens_kept(sequence, layer)
        n_heads, _ = model.layer_heads[layer]
        heads = (HeadStats.of(*session.kept(layer, h, sequence)) for h in range(n_heads))
        attends = all(model.attention_layers[layer : layer + 1])
        evictions = session.tokens_seen(sequence) - kept if attends else 0
        return LayerStats(kept, evictions, tuple(heads))


@dataclass(frozen=True)
class Stats:
    """The contents of the cache. Every KV head of a layer keeps the same number of tokens."""

    tokens_seen: int
    tokens_kept: int  # in the layer that keeps the most
    evictions: int  # tokens_seen - tokens_kept
    cache_bytes: int  # allocated for K, V, positions and scores of all layers
    draft_bytes: int  # allocated for the caches that propose drafts: draft=, lossless
    full_cache_bytes: int  # of a full cache of n_ctx tokens
    archive_bytes: int  # archives of all sequences
    n_sequences: int  # whose caches are allocated
    n_ctx: int
    n_layers: int
    n_kv_heads: int
    backend: str
    # Keys and values too large for kv_dtype, also of wrong drafts, but not in the caches that
    # propose drafts; 0 on CUDA, where they are not counted.
    clamped: int
    layers: tuple[LayerStats, ...] = ()  # with stats(layers=True)

    @staticmethod
    def of(model: _core.Model, engine: _core.Engine, *, layers: bool) -> Stats:
        """Reads those of the engine's last sequence."""
        session, sequence = engine.session, engine.last_sequence
        kept = session.tokens_kept(sequence)  # first, as it may be growing
        seen = session.tokens_seen(sequence)
        each = range(model.n_layers) if layers else ()
        return Stats(
            tokens_seen=seen,
            tokens_kept=kept,
            evictions=seen - kept,
            cache_bytes=session.cache_bytes,
            draft_bytes=EngineStats(*engine.stats()).draft_bytes,
            full_cache_bytes=session.full_cache_bytes,
            archive_bytes=session.archive_bytes,
            n_sequences=session.n_sequences,
            n_ctx=session.n_ctx,
            n_layers=model.n_layers,
            n_kv_heads=model.n_kv_heads,
            backend=model.backend,
            clamped=session.n_clamped,
            layers=tuple(LayerStats.of(model, session, sequence, layer) for layer in each),
        )


@dataclass(frozen=True)
class EngineStats:
    """The state of an Engine, and counters since its start."""

    n_sequences: int
    n_active: int  # requests with a sequence
    n_waiting: int  # requests in the queue
    prompt_tokens: int  # read
    generated_tokens: int
    evictions: int  # in the layer that keeps the most
    cached_tokens: int  # prompt tokens from the prefix cache
    prefix_bytes: int  # size of the prefix cache
    n_allocated: int  # sequences whose caches are allocated
    drafted_tokens: int  # proposed as drafts
    accepted_tokens: int  # of these, generated
    draft_bytes: int  # allocated for the caches that propose them
