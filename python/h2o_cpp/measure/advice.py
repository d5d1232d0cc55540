"""Advice: the smallest cache in bytes with an acceptable loss of perplexity on a text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median
from typing import Any, Literal

import numpy as np

from h2o_cpp import _core
from h2o_cpp.measure.budgets import Budgeted, at_budgets
from h2o_cpp.measure.heads import RETRIEVAL_HEADS
from h2o_cpp.measure.perplexity import Measurement, perplexity
from h2o_cpp.measure.retrieval.measurement import measure as measure_retrieval
from h2o_cpp.measure.retrieval.tasks import make_samples
from h2o_cpp.measure.speed import decode_seconds
from h2o_cpp.model.arguments import (
    KvDType,
    archive_arguments,
    check_context,
    check_float,
    check_int,
)
from h2o_cpp.model.cache_memory import default_types
from h2o_cpp.model.policy import Policy, named_policy
from h2o_cpp.model.session import open_model, open_session
from h2o_cpp.model.tokenizer import Tokenizer

_N_CTX = 2048  # default window: at most this many tokens
_WINDOWS = 2  # windows read by default
_LEAST = 100  # least tokens of a text and a window, so that a percent is a token
_SEARCH = 9  # most budgets per search
_DECODED = 16  # tokens decoded to measure the speed
_NEEDLES = 4  # prompts that ask for a number
_NEEDLE_TOKENS = 1000  # most tokens of such a prompt
_NEEDLE_BATCH = 32  # tokens per chunk of such a prompt
_SHARES = (0.1, 0.2, 1.0)  # of the KV heads, tried if the model ranks them


def archive_of(one: Trial | Archived) -> dict[str, Any]:
    """The options of its archive, as for Generator."""
    return {
        "archive": one.archive,
        "archive_pages": one.archive_pages,
        "archive_heads": one.archive_heads,
    }


@dataclass(frozen=True)
class Trial(Measurement):
    """Perplexity with one policy and types of K and V."""

    kv_dtype: KvDType = "f16"
    archive: KvDType | None = None  # types of the archive; None: no archive
    archive_pages: int | None = None  # None: default
    archive_heads: float | None = None  # share of the KV heads; None: all


@dataclass(frozen=True)
class Needle:
    """Log-likelihoods, in nats per token, of a number in the prompt that is asked for after
    eviction."""

    found: float  # with the advised cache
    full: float  # with the full f16 cache
    absent: float  # with the full cache, without the number in the prompt

    @property
    def share(self) -> float | None:
        """The fraction of the full cache's gain that is left; None if that gain is small."""
        gain = self.full - self.absent
        return (self.found - self.absent) / gain if gain > 0.5 else None


@dataclass(frozen=True)
class Archived:
    """The smallest cache with an archive, for the policy and types of an Advice."""

    hh: float  # fraction of n_ctx
    archive: KvDType  # types of K and V
    archive_pages: int | None  # None: default
    archive_heads: float | None  # share of the KV heads; None: all
    kept: int  # tokens per layer and KV head
    loss: float  # relative increase of perplexity over the full cache
    perplexity: float
    cache_bytes: int
    archive_bytes: int  # at the end of a window, in addition to cache_bytes
    needle: Needle
    tokens_per_second: float  # as in Advice


@dataclass(frozen=True)
class Advice:
    """The advised budget and the measurements behind it."""

    model: str  # path of the GGUF file
    hh: float  # fraction of n_ctx; 1.0 if no smaller cache is acceptable
    policy: str
    kv_dtype: KvDType  # types of K and V
    kept: int  # tokens per layer and KV head
    n_ctx: int
    tokens: int  # predicted tokens
    loss: float  # relative increase of perplexity over the full cache
    most_loss: float  # the allowed loss
    perplexity: float
    full_perplexity: float
    cache_bytes: int
    full_cache_bytes: int  # in f16
    needle: Needle
    # Tokens decoded per second at the end of n_ctx, measured on `backend`.
    tokens_per_second: float
    full_tokens_per_second: float
    backend: str
    curve: tuple[Trial, ...]  # all measurements by policy, type and budget, the full cache first
    archived: Archived | None = None  # if an archive was given


def advise(
    path: str | os.PathLike[str],
    text: str,
    *,
    loss: float = 0.01,
    policies: Sequence[str] = ("h2o", "mean", "contribution"),
    kv_dtypes: Sequence[KvDType] | None = None,
    n_ctx: int | None = None,
    text_tokens: int | None = None,
    n_batch: int = 1,
    threads: int | None = None,
    archive: KvDType | None = None,
    archive_pages: int | None = None,
    archive_heads: float | Sequence[float] | Literal["auto"] | None = None,
) -> Advice:
    """Find the smallest cache in bytes whose loss of perplexity on `text` is acceptable.

    path, threads: as for Generator; runs on the CPU.
    text: typical input of the model; longer texts give more reliable results.
    loss: the allowed relative increase of perplexity.
    policies: names from h2o_cpp.policy.POLICIES to compare.
    kv_dtypes: types of K and V, or pairs (K, V). The first is tried with every policy, the others
        with the best of them. Default: f16, and q8_0 if the head size is divisible by 32.
    n_ctx: tokens per window, each read into an empty cache; 0: the trained length; default: the
        trained length, at most 2048 and the length of the text.
    text_tokens: most tokens of the text to read; default: two windows.
    n_batch: tokens per chunk, each followed by eviction: 1 is as in decoding, more is faster.
    archive, archive_pages: as for Generator. If given, the search for the smallest cache is
        repeated with an archive for the best policy and types.
    archive_heads: shares of the KV heads to try, as for Generator. The advised one takes the fewest
        bytes of cache and archive together. None, "auto": 0.1, 0.2 and 1 if the model ranks its
        heads, otherwise all heads.

    The budget of each policy, in whole percents, is found by bisection. If perplexity does not
    always fall as the budget grows, a smaller budget may exist. The advised cache is measured, also
    on retrieving a number from a prompt of up to 1000 tokens after eviction. On a terminal, a bar
    shows the progress.

    Raises FileNotFoundError, ValueError (options, a text of less than 100 tokens) and MemoryError.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # as in open_model

    if not 0 <= check_float("loss", loss) < 1:
        raise ValueError(f"loss={loss!r}, expected a fraction from 0 and below 1")
    for name, names in (("policies", policies), ("kv_dtypes", kv_dtypes)):
        if isinstance(names, str):
            raise TypeError(f"{name}={names!r}, expected a list of names")
    if not policies:
        raise ValueError("policies is empty, expected one or more")
    if kv_dtypes is not None and not kv_dtypes:
        raise ValueError("kv_dtypes is empty, expected one or more")
    at_budgets(policies, [1.0], _LEAST)  # checks the names
    given_shares = _shares(archive, archive_pages, archive_heads)
    model = open_model(path, device="cpu", threads=threads)
    types: Sequence[KvDType] = kv_dtypes or default_types(model.head_dim)
    tokenizer = Tokenizer.of_model(model)
    beginning = tokenizer.encode("")
    tokens = tokenizer.encode(text, add_special=False)
    n_text = len(beginning) + len(tokens)
    if n_text < _LEAST:
        raise ValueError(f"the text has {n_text} tokens, expected at least {_LEAST}")
    n_ctx = check_context(n_ctx, model.n_ctx_train, min(n_text, _N_CTX))
    check_int("n_ctx", n_ctx, _LEAST)
    n_text = (
        _WINDOWS * n_ctx if text_tokens is None else check_int("text_tokens", text_tokens, n_ctx)
    )
    tokens = tokens[:n_text]
    ranked = model.file.metadata().get(RETRIEVAL_HEADS)
    shares: Sequence[float | None] = given_shares or (_SHARES if ranked else [None])
    if archive is not None:  # raises if the model cannot have one
        open_session(
            model, Policy.full(), n_ctx=n_ctx, n_batch=1, archive=archive,
            archive_pages=archive_pages, archive_heads=shares[0],
        )  # fmt: skip

    n_searches = len(policies) + len(types) - 1 + (len(shares) if archive is not None else 0)
    n_most = (len(types) + 1 + _SEARCH * n_searches) * len(tokens)
    with tqdm(total=n_most, desc="budgets", unit="token", disable=None, leave=False) as bar:

        def measure(one: Budgeted, **archive: Any) -> Trial:
            session = open_session(
                model, one.policy, n_ctx=n_ctx, n_batch=n_batch, kv_dtype=one.kv_dtype, **archive
            )
            value, n = perplexity(session, tokens, beginning=beginning, progress=bar.update)
            return Trial(
                one.name, one.budget, one.kept, value, n, session.cache_bytes,
                session.archive_bytes, kv_dtype=one.kv_dtype, **archive,
            )  # fmt: skip

        def costs_little(one: Trial) -> bool:
            return one.perplexity <= full.perplexity * (1 + loss)

        def search(name: str, whole: Trial, good: int = 100) -> list[Trial]:
            """The measured budgets; `whole` is the trial without eviction.

            good: percents known to be enough; only smaller budgets are tried.
            """
            nonlocal n_searches
            found = {100: replace(whole, policy=name)} if good == 100 else {}
            bad = 0  # percents
            while good - bad > 1:
                percent = min(max(round(sqrt(max(bad, 1) * good)), bad + 1), good - 1)
                (one,) = at_budgets([name], [percent / 100], n_ctx, whole.kv_dtype)
                found[percent] = measure(one, **archive_of(whole))
                if costs_little(found[percent]):
                    good = percent
                else:
                    bad = percent
            n_searches -= 1
            bar.total = bar.n + _SEARCH * n_searches * len(tokens)
            return [found[percent] for percent in sorted(found)]

        def smallest(trials: Sequence[Trial]) -> Trial:
            return min(
                filter(costs_little, trials), key=lambda one: (one.cache_bytes, one.perplexity)
            )

        whole = Budgeted("full", 1.0, n_ctx, Policy.full())
        full = measure(whole)
        curve = [full]
        archived: Archived | None = None
        best = full
        for kv_dtype in types:
            all_kept = full
            if kv_dtype != "f16":
                all_kept = measure(whole._replace(kv_dtype=kv_dtype))
            if not costs_little(all_kept):  # nor will smaller budgets be
                curve.append(all_kept)
                continue
            for name in policies if best is full else [best.policy]:
                curve += search(name, all_kept)
            best = smallest(curve[1:])
        if archive is not None:
            all_kept = next(
                one for one in curve if (one.budget, one.kv_dtype) == (1, best.kv_dtype)
            )
            candidates: list[Trial] = []
            enough = 100
            for share in shares:  # a larger one takes more bytes, unless its budget is smaller
                with_archive = replace(
                    all_kept, archive=archive, archive_pages=archive_pages, archive_heads=share
                )
                trials = search(best.policy, with_archive, enough)
                if any(map(costs_little, trials)):
                    candidates.append(smallest(trials))
                    enough = round(100 * candidates[-1].budget)
                curve += trials
            least = min(candidates, key=lambda one: one.cache_bytes + one.archive_bytes)
            archived = Archived(
                hh=least.budget,
                **archive_of(least),
                kept=least.kept,
                loss=least.perplexity / full.perplexity - 1,
                perplexity=least.perplexity,
                cache_bytes=least.cache_bytes,
                archive_bytes=least.archive_bytes,
                needle=_find_needles(model, tokenizer, least, n_ctx),
                tokens_per_second=_speed(model, least, n_ctx),
            )
    return Advice(
        model=model.file.path,
        hh=best.budget,
        policy=best.policy,
        kv_dtype=best.kv_dtype,
        kept=best.kept,
        n_ctx=n_ctx,
        tokens=best.tokens,
        loss=best.perplexity / full.perplexity - 1,
        most_loss=loss,
        perplexity=best.perplexity,
        full_perplexity=full.perplexity,
        cache_bytes=best.cache_bytes,
        full_cache_bytes=full.cache_bytes,
        needle=_find_needles(model, tokenizer, best, n_ctx),
        tokens_per_second=_speed(model, best, n_ctx),
        full_tokens_per_second=_speed(model, full, n_ctx),
        backend=model.backend,
        curve=tuple(curve),
        archived=archived,
    )


def _shares(archive: KvDType | None, pages: int | None, heads: Any) -> list[float] | None:
    """The shares of the KV heads to try, the smallest first; None: those that suit the model.

    Raises ValueError for invalid options of the archive.
    """
    given = heads if isinstance(heads, Sequence) and not isinstance(heads, str) else [heads]
    if not given:
        raise ValueError("archive_heads is empty, expected one or more")
    auto = archive is not None and isinstance(heads, str) and heads == "auto"
    for share in given:
        archive_arguments(archive, pages, heads=None if auto else share)
    return None if auto or heads is None else sorted(set(given))


def _find_needles(model: _core.Model, tokenizer: Tokenizer, advised: Trial, n_ctx: int) -> Needle:
    """Log-likelihoods with the advised cache; the number is asked for after eviction."""
    length = min(n_ctx, _NEEDLE_TOKENS)
    samples = make_samples(tokenizer, "needle", n=_NEEDLES, length=length)
    full, absent, found = measure_retrieval(
        model, {"needle": samples}, policies=[advised.policy], budgets=[advised.budget],
        n_ctx=length, n_batch=min(_NEEDLE_BATCH, length), kv_dtype=advised.kv_dtype,
        question_apart=True, **archive_of(advised),
    )  # fmt: skip
    return Needle(found.log_likelihood, full.log_likelihood, absent.log_likelihood)


def _speed(model: _core.Model, one: Trial, n_ctx: int) -> float:
    """Tokens per second at the end of the context."""
    policy = Policy.full() if one.policy == "full" else named_policy(one.policy, one.kept)
    tokens = np.random.default_rng(0).integers(model.n_vocab, size=n_ctx, dtype=np.int32)
    session = open_session(
        model, policy, n_ctx=n_ctx, n_batch=min(512, n_ctx), kv_dtype=one.kv_dtype,
        **archive_of(one),
    )  # fmt: skip
    return 1 / median(decode_seconds(session, tokens, n_ctx - _DECODED))
