"""Perplexity of a text while the cache evicts: what a policy costs at a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.arguments import whole
from h2o_cpp.policy import Policy
from h2o_cpp.session import open_session

# Attention sinks that StreamingLLM (arXiv 2309.17453) keeps.
_N_SINKS = 4


def _sinks(n: int) -> Policy:
    n_sinks = min(_N_SINKS, n - 1)
    return Policy.sinks(n_sinks, n - n_sinks)


# Policies that keep n tokens, by name.
POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "h2o": lambda n: Policy.h2o(heavy=n // 2, recent=n - n // 2),
    "window": Policy.window,
    "sinks": _sinks,
}


@dataclass(frozen=True)
class Measurement:
    """Perplexity under one policy."""

    policy: str
    budget: float  # of n_ctx
    kept: int  # tokens, per layer and KV head
    perplexity: float
    tokens: int  # that were predicted
    cache_bytes: int  # allocated


def perplexity(
    model: _core.Model,
    tokens: Sequence[int],
    policy: Policy,
    *,
    n_ctx: int,
    beginning: Sequence[int] = (),
    stride: int | None = None,
    chunk: int = 1,
    kv_dtype: str | tuple[str, str] = "f16",
) -> tuple[float, int, int]:
    """Perplexity, number of tokens predicted, and bytes of the cache.

    The tokens are read in windows of n_ctx, each from an empty cache and with `beginning` in front:
    the token that models expect there. The last `stride` tokens of a window (default: all but its
    first) are predicted, and the next window begins `stride` later.
    `chunk` tokens are fed at a time, and eviction follows each chunk: 1 is generation's own rhythm,
    in which every prediction is made from what is kept.
    """
    whole("n_ctx", n_ctx, 2)
    stride = n_ctx - 1 if stride is None else whole("stride", stride, 1, n_ctx - 1)
    whole("chunk", chunk, 1, n_ctx)
    n_text = n_ctx - len(beginning)
    if not 0 < n_text <= len(tokens):
        raise ValueError(f"the text has {len(tokens)} tokens, fewer than n_ctx={n_ctx} takes")
    session = open_session(model, policy, n_ctx=n_ctx, n_batch=chunk, kv_dtype=kv_dtype)
    total, n = 0.0, 0
    for begin in range(0, len(tokens) - n_text + 1, stride):
        window = np.asarray([*beginning, *tokens[begin : begin + n_text]], np.int32)
        losses = np.concatenate(list(_losses(session, window, chunk)))[-stride:]
        total += float(losses.sum())
        n += losses.size
    return exp(total / n), n, session.cache_bytes


def measure(
    model: _core.Model,
    tokens: Sequence[int],
    *,
    policies: Sequence[str],
    budgets: Sequence[float],
    n_ctx: int,
    beginning: Sequence[int] = (),
    stride: int | None = None,
    chunk: int = 1,
    kv_dtype: str | tuple[str, str] = "f16",
) -> Iterator[Measurement]:
    """The full cache, then every policy at every budget (fractions of n_ctx), at equal slots."""
    for name in policies:
        if name not in POLICIES:
            raise ValueError(f"policy {name!r} is not one of {', '.join(POLICIES)}")
    counts = {budget: int(budget * n_ctx) for budget in budgets}
    for budget, count in counts.items():
        if not 0 < budget <= 1 or count < 1:
            raise ValueError(
                f"budget {budget} keeps {count} of n_ctx={n_ctx} tokens, expected 1 up"
            )

    def one(name: str, budget: float, kept: int, policy: Policy) -> Measurement:
        value, n, nbytes = perplexity(
            model,
            tokens,
            policy,
            n_ctx=n_ctx,
            beginning=beginning,
            stride=stride,
            chunk=chunk,
            kv_dtype=kv_dtype,
        )
        return Measurement(name, budget, kept, value, n, nbytes)

    yield one("full", 1.0, n_ctx, Policy.full())
    for budget, count in counts.items():
        for name in policies:
            yield one(name, budget, count, POLICIES[name](count))


def _losses(
    session: _core.Session, window: NDArray[np.int32], chunk: int
) -> Iterator[NDArray[np.float64]]:
    """-log p of window[1:], each from the logits after the token before it."""
    session.reset(0)
    for begin in range(0, len(window) - 1, chunk):
        fed = window[begin : min(begin + chunk, len(window) - 1)]
        logits = session.score(0, fed).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        normaliser = np.log(np.exp(logits).sum(axis=1))
        targets = window[begin + 1 : begin + 1 + len(fed)]
        yield normaliser - logits[np.arange(len(fed)), targets]
