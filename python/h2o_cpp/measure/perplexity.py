"""Perplexity of a text while the cache evicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import exp, inf

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.measure.budgets import budgeted
from h2o_cpp.model.arguments import KvDType, check_int
from h2o_cpp.model.session import chunks, open_session

# Parts of a text read in one pass, whose perplexities are reported.
N_SEGMENTS = 10


@dataclass(frozen=True)
class Measurement:
    """Perplexity with one policy."""

    policy: str
    budget: float  # fraction of n_ctx, or of bytes
    kept: int  # tokens per layer and KV head
    perplexity: float
    tokens: int  # predicted tokens
    cache_bytes: int  # allocated
    archive_bytes: int = 0  # of evicted tokens, at the end
    segments: tuple[float, ...] = ()  # when streaming: perplexity of each tenth of the text


def perplexity(
    session: _core.Session,
    tokens: Sequence[int],
    *,
    beginning: Sequence[int] = (),
    stride: int | None = None,
    progress: Callable[[int], object] = lambda n: None,
) -> tuple[float, int]:
    """The perplexity, and the number of predicted tokens.

    beginning: tokens put before each window, such as beginning-of-text.
    stride: predicted tokens at the end of each window, and the distance between windows; default:
        all but the first token.
    progress: called with the number of tokens read since the last call.

    The tokens are read in windows of the session's n_ctx, each into an empty cache, in chunks of
    the session's n_batch. Eviction follows each chunk: with 1, as in decoding, every prediction
    uses only kept tokens.
    """
    n_ctx = session.n_ctx
    stride = n_ctx - 1 if stride is None else check_int("stride", stride, 1, n_ctx - 1)
    n_text = n_ctx - len(beginning)
    if not 0 < n_text <= len(tokens):
        raise ValueError(
            f"the text has {len(tokens)} tokens, expected at least {n_text} for n_ctx={n_ctx}"
        )
    total, n = 0.0, 0
    for begin in range(0, len(tokens) - n_text + 1, stride):
        window = np.asarray([*beginning, *tokens[begin : begin + n_text]], np.int32)
        parts = []
        for part in _losses(session, window):
            parts.append(part)
            progress(len(part))
        losses = np.concatenate(parts)[-stride:]
        total += float(losses.sum())
        n += losses.size
    return _perplexity(total / n), n


def stream_losses(session: _core.Session, tokens: Sequence[int]) -> NDArray[np.float64]:
    """-log p of tokens[1:], in nats, in one pass.

    The cache is empty at the start. Past n_ctx, positions roll, or ValueError is raised if they
    cannot. n_batch as in perplexity().
    """
    if len(tokens) < 2:
        raise ValueError(f"the text has {len(tokens)} tokens, expected at least 2")
    if len(tokens) - 1 > session.n_ctx and not session.can_roll(0):
        raise ValueError(
            f"the text has {len(tokens)} tokens, expected at most {session.n_ctx + 1}, "
            "since positions do not roll with this model or policy"
        )
    return np.concatenate(list(_losses(session, np.asarray(tokens, np.int32))))


def measure(
    model: _core.Model,
    tokens: Sequence[int],
    *,
    policies: Sequence[str],
    budgets: Sequence[float],
    n_ctx: int,
    beginning: Sequence[int] = (),
    stride: int | None = None,
    n_batch: int = 1,
    kv_dtype: KvDType | None = None,
    streaming: bool = False,
    equal_bytes: bool = False,
    archive: KvDType | None = None,
    archive_pages: int | None = None,
    archive_heads: float | None = None,
) -> Iterator[Measurement]:
    """Measure the full cache, then every policy at every budget (fractions of n_ctx).

    equal_bytes: budgets are fractions of a full f16 cache's bytes, in kv_dtype or in types chosen
        as by cache_memory; the full cache is in f16.
    streaming: one pass over `beginning` and the whole text instead of windows. For texts longer
        than n_ctx, there is no full cache.
    archive, archive_pages, archive_heads: as for Generator, for policies that evict.
    """
    check_int("n_ctx", n_ctx, 2)
    check_int("n_batch", n_batch, 1, n_ctx)
    every = budgeted(policies, budgets, model, n_ctx, kv_dtype, equal_bytes=equal_bytes)
    if streaming and stride is not None:
        raise ValueError("stride applies to windows, not to streaming")
    if streaming and len(tokens) <= N_SEGMENTS:
        raise ValueError(f"the text has {len(tokens)} tokens, expected more than {N_SEGMENTS}")
    text = [*beginning, *tokens]
    if streaming and len(text) > n_ctx:
        every = every[1:]
    for name, budget, kept, policy, types in every:
        session = open_session(
            model, policy, n_ctx=n_ctx, n_batch=n_batch, kv_dtype=types, archive=archive,
            archive_pages=archive_pages, archive_heads=archive_heads,
        )  # fmt: skip
        segments: tuple[float, ...] = ()
        if streaming:
            losses = stream_losses(session, text)
            value, n = _perplexity(losses.mean()), losses.size
            parts = np.array_split(losses, N_SEGMENTS)
            segments = tuple(_perplexity(part.mean()) for part in parts)
        else:
            value, n = perplexity(session, tokens, beginning=beginning, stride=stride)
        sizes = session.cache_bytes, session.archive_bytes
        yield Measurement(name, budget, kept, value, n, *sizes, segments)


def token_losses(logits: NDArray[np.float32], targets: NDArray[np.int32]) -> NDArray[np.float64]:
    """-log p of targets [n], in nats, from logits [n, n_vocab]. Raises ValueError for NaN."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    normalizer = np.log(np.exp(rows).sum(axis=1))
    losses: NDArray[np.float64] = normalizer - rows[np.arange(len(targets)), targets]
    if np.isnan(losses).any():
        raise ValueError("the model computes NaN instead of logits, are its weights damaged?")
    return losses


def _perplexity(loss: float) -> float:
    """From the mean loss; infinity if it is larger than any float."""
    with suppress(OverflowError):
        return exp(loss)
    return inf


def _losses(session: _core.Session, window: NDArray[np.int32]) -> Iterator[NDArray[np.float64]]:
    """-log p of window[1:], in nats, chunk by chunk."""
    session.reset(0)
    targets = window[1:]
    for fed in chunks(session, window[:-1]):
        yield token_losses(session.score(0, fed), targets[: len(fed)])
        targets = targets[len(fed) :]
