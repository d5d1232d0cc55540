"""Advice: the smallest cache whose loss of perplexity on a text is acceptable."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import median

import numpy as np

from h2o_cpp import _core
from h2o_cpp.measure.perplexity import Budgeted, Measurement, at_budgets, perplexity
from h2o_cpp.measure.speed import decode_seconds
from h2o_cpp.model.arguments import check_float, check_int
from h2o_cpp.model.policy import Policy
from h2o_cpp.model.session import open_model, open_session
from h2o_cpp.model.tokenizer import Tokenizer

_N_CTX = 2048  # most tokens of a window
_WINDOWS = 2  # that are read of a long text
_LEAST = 100  # tokens of a text: a percent of it is then a token
_SEARCH = 9  # budgets that a search measures at most
_DECODED = 16  # tokens, to see how fast it is


@dataclass(frozen=True)
class Advice:
    """A budget, and what it was found from."""

    model: str  # the GGUF file
    hh: float  # of n_ctx; 1.0 if no smaller cache costs so little
    policy: str
    kept: int  # tokens, per layer and KV head
    n_ctx: int
    tokens: int  # that were predicted
    loss: float  # perplexity over that of the full cache, less 1
    most_loss: float  # that was asked for
    perplexity: float
    full_perplexity: float
    cache_bytes: int
    full_cache_bytes: int
    # Tokens decoded per second at the end of n_ctx, measured here and now, on `backend`.
    tokens_per_second: float
    full_tokens_per_second: float
    backend: str
    curve: tuple[Measurement, ...]  # all that was measured, by policy and budget; first the full


def advise(
    path: str | os.PathLike[str],
    text: str,
    *,
    loss: float = 0.01,
    policies: Sequence[str] = ("h2o", "mean", "contribution"),
    n_ctx: int | None = None,
    text_tokens: int | None = None,
    n_batch: int = 1,
    threads: int | None = None,
) -> Advice:
    """The smallest budget, in whole percents, that costs `text` little perplexity.

    path, threads: as for Generator; it is computed on the CPU.
    text: one like those that the model is for; the longer, the surer.
    loss: the perplexity may be more by this fraction.
    policies: of h2o_cpp.model.policy.POLICIES; the one that needs the smallest cache is advised.
    n_ctx: tokens of a window, each read from an empty cache; default: as trained, but at most 2048
        and the text.
    text_tokens: of the text; default: two windows.
    n_batch: tokens read at a time, with eviction after each; 1 is generation's own rhythm, more is
        faster.

    Each policy's budget is found by bisection, which is right where the perplexity falls as the
    budget grows; where it wavers, it may miss a budget that is smaller still. What it advises has
    been measured. On a terminal a bar shows how far it is.

    Raises FileNotFoundError, ValueError (options, a text of less than 100 tokens) and MemoryError.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # as in open_model

    if not 0 <= check_float("loss", loss) < 1:
        raise ValueError(f"loss={loss!r}, expected a fraction from 0 and below 1")
    if not policies:
        raise ValueError("policies is empty, expected one or more")
    at_budgets(policies, [1.0], _LEAST)  # they exist
    model = open_model(path, device="cpu", threads=threads)
    tokenizer = Tokenizer.of_model(model)
    beginning = tokenizer.encode("")
    tokens = tokenizer.encode(text, add_special=False)
    n_text = len(beginning) + len(tokens)
    if n_text < _LEAST:
        raise ValueError(f"the text has {n_text} tokens, expected at least {_LEAST}")
    if n_ctx is None:
        n_ctx = min(model.n_ctx_train, n_text, _N_CTX)
    n_ctx = check_int("n_ctx", n_ctx, _LEAST, model.n_ctx_train)
    n_text = (
        _WINDOWS * n_ctx if text_tokens is None else check_int("text_tokens", text_tokens, n_ctx)
    )
    tokens = tokens[:n_text]

    n_most = (1 + _SEARCH * len(policies)) * len(tokens)
    with tqdm(total=n_most, desc="budgets", unit="token", disable=None, leave=False) as bar:

        def measure(one: Budgeted) -> Measurement:
            value, n, nbytes = perplexity(
                model, tokens, one.policy, n_ctx=n_ctx, beginning=beginning, n_batch=n_batch,
                progress=bar.update,
            )  # fmt: skip
            return Measurement(one.name, one.budget, one.kept, value, n, nbytes)

        full = measure(Budgeted("full", 1.0, n_ctx, Policy.full()))
        curve = [full]
        for i, name in enumerate(policies, 1):
            found = {100: Measurement(name, 1.0, n_ctx, *_results(full))}  # it evicts nothing
            bad, good = ceil(100 / n_ctx) - 1, 100  # percents; the first has no token, or too few
            while good - bad > 1:
                percent = min(max(round(sqrt(max(bad, 1) * good)), bad + 1), good - 1)
                (one,) = at_budgets([name], [percent / 100], n_ctx)
                found[percent] = measure(one)
                if found[percent].perplexity <= full.perplexity * (1 + loss):
                    good = percent
                else:
                    bad = percent
            curve += [found[percent] for percent in sorted(found)]
            bar.total = bar.n + _SEARCH * (len(policies) - i) * len(tokens)
    enough = [one for one in curve[1:] if one.perplexity <= full.perplexity * (1 + loss)]
    best = min(enough, key=lambda one: (one.kept, one.perplexity))
    (advised,) = at_budgets([best.policy], [best.budget], n_ctx)
    return Advice(
        model=model.file.path,
        hh=best.budget,
        policy=best.policy,
        kept=best.kept,
        n_ctx=n_ctx,
        tokens=best.tokens,
        loss=best.perplexity / full.perplexity - 1,
        most_loss=loss,
        perplexity=best.perplexity,
        full_perplexity=full.perplexity,
        cache_bytes=best.cache_bytes,
        full_cache_bytes=full.cache_bytes,
        tokens_per_second=_speed(model, advised.policy, n_ctx),
        full_tokens_per_second=_speed(model, Policy.full(), n_ctx),
        backend=model.backend,
        curve=tuple(curve),
    )


def _results(full: Measurement) -> tuple[float, int, int]:
    return full.perplexity, full.tokens, full.cache_bytes


def _speed(model: _core.Model, policy: Policy, n_ctx: int) -> float:
    """Tokens per second at the end of the context."""
    tokens = np.random.default_rng(0).integers(model.n_vocab, size=n_ctx, dtype=np.int32)
    session = open_session(model, policy, n_ctx=n_ctx, n_batch=min(512, n_ctx))
    return 1 / median(decode_seconds(session, tokens, n_ctx - _DECODED))
