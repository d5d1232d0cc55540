"""Perplexity of a text while the cache evicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import exp, inf

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.arguments import check_int
from h2o_cpp.measure.agreement import Agreement, agreement_of
from h2o_cpp.measure.budgets import Comparison
from h2o_cpp.measure.windows import windows
from h2o_cpp.model.session import chunks

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
    agreement: Agreement | None = None  # with the full cache
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
    total, n = 0.0, 0
    for window in windows(tokens, session.n_ctx, beginning=beginning, stride=stride):
        parts = []
        for part in _losses(session, window):
            parts.append(part)
            progress(len(part))
        losses = np.concatenate(parts)[-(stride or 0) :]
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
    every: Comparison,
    *,
    beginning: Sequence[int] = (),
    stride: int | None = None,
    streaming: bool = False,
    agreement: bool = False,
) -> Iterator[Measurement]:
    """Measure the full cache, then every policy at every budget.

    every: the caches. n_ctx is required; n_batch of 1 is as in decode.
    streaming: one pass over `beginning` and the whole text instead of windows. For texts longer
        than n_ctx, there is no full cache.
    agreement: compare the predictions of all windows with those of the full cache.
    """
    n_ctx = check_int("n_ctx", every.cache.context, 2)
    check_int("n_batch", every.cache.n_batch, 1, n_ctx)
    compared = every.caches(model)
    if agreement and (streaming or stride is not None):
        raise ValueError("agreement applies to whole windows, not to streaming or a stride")
    if streaming and stride is not None:
        raise ValueError("stride applies to windows, not to streaming")
    if streaming and len(tokens) <= N_SEGMENTS:
        raise ValueError(f"the text has {len(tokens)} tokens, expected more than {N_SEGMENTS}")
    text = [*beginning, *tokens]
    if streaming and len(text) > n_ctx:
        compared = compared[1:]
    for one in compared:
        session = every.session(model, one)
        segments: tuple[float, ...] = ()
        if streaming:
            losses = stream_losses(session, text)
            value, n = _perplexity(losses.mean()), losses.size
            parts = np.array_split(losses, N_SEGMENTS)
            segments = tuple(_perplexity(part.mean()) for part in parts)
        else:
            value, n = perplexity(session, tokens, beginning=beginning, stride=stride)
        sizes = session.cache_bytes, session.archive_bytes
        agreed = None
        if agreement:
            full = every.session(model, compared[0])
            agreed = agreement_of(full, session, tokens, beginning=beginning)
        yield Measurement(one.name, one.budget, one.kept, value, n, *sizes, agreed, segments)


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
    """The perplexity of the mean loss; infinity if it is larger than any float."""
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
