"""Advice: the smallest cache in bytes with an acceptable loss on a text, or on questions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np

from h2o_cpp import _core
from h2o_cpp.arguments import KvDType, check_float
from h2o_cpp.budget.cache_memory import default_types
from h2o_cpp.budget.policy import Policy, named_policy
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.measure.budget_search import TRIALS, BudgetSearch, Trial
from h2o_cpp.measure.budgets import Comparison, at_budgets
from h2o_cpp.measure.heads import RETRIEVAL_HEADS
from h2o_cpp.measure.quality import LEAST_TOKENS, AnswerQuality, TextQuality
from h2o_cpp.measure.retrieval.measurement import measure as measure_retrieval
from h2o_cpp.measure.retrieval.tasks import make_samples
from h2o_cpp.measure.speed import decode_seconds
from h2o_cpp.model.session import open_model, open_session
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.options import ArchiveOptions, Options, function_with, make_options

_DECODED = 16  # tokens decoded to measure the speed
_NEEDLES = 4  # prompts that ask for a number
_NEEDLE_TOKENS = 1000  # most tokens of such a prompt
_NEEDLE_BATCH = 32  # tokens per chunk of such a prompt
_LOST = 0.5  # share of a fact below which it counts as lost
_SHARES = (0.1, 0.2, 1.0)  # of the KV heads, tried if the model ranks them
_FIRST_BATCH = 32  # least tokens per chunk for the first answer

Questions = Sequence[tuple[str, str]]
Progress = Callable[[int], object]


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
    # The smallest cache that protects the beginning of all questions, if it is smaller.
    protected: Trial | None = None
    # The same as `needle` with archive="q8_0", where the advised cache loses the number.
    needle_in_archive: Needle | None = None
    is_final: bool = True  # False: the search goes on, or was interrupted


class Step(NamedTuple):
    """An answer while the search goes on."""

    advice: Advice
    seconds_left: float  # roughly


@dataclass(frozen=True, kw_only=True)
class AdviceOptions(Options):
    """The options of advise(), which documents them."""

    loss: float = 0.01
    policies: Sequence[str] = ("h2o", "mean", "contribution")
    kv_dtypes: Sequence[KvDType] | None = None
    n_ctx: int | None = None
    text_tokens: int | None = None
    n_batch: int = 1
    threads: int | None = None
    archive: KvDType | None = None
    archive_pages: int | None = None
    archive_heads: float | Sequence[float] | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= check_float("loss", self.loss) < 1:
            raise ValueError(f"loss={self.loss!r}, expected a fraction from 0 and below 1")
        for name in ("policies", "kv_dtypes"):
            values = getattr(self, name)
            if isinstance(values, str):
                raise TypeError(f"{name}={values!r}, expected a list of names")
            if values is not None and not values:
                raise ValueError(f"{name} is empty, expected one or more")
        at_budgets(self.policies, [1.0], LEAST_TOKENS)  # checks the names
        if not self._shares:
            raise ValueError("archive_heads is empty, expected one or more")
        for share in self._shares:
            ArchiveOptions(**self._archive(share))  # checks them

    def archives(self, model: _core.Model) -> list[dict[str, Any]]:
        """The options of the archives to try, those with more bytes last."""
        if self.archive is None:
            return []
        shares = self._shares
        if shares == [None] and model.file.metadata().get(RETRIEVAL_HEADS):
            shares = [*_SHARES]
        return [self._archive(share) for share in sorted(set(shares), key=lambda one: one or 0)]

    @property
    def _shares(self) -> list[Any]:
        """The given shares of the KV heads; [None]: they are chosen for the model."""
        heads = self.archive_heads
        if self.archive is not None and isinstance(heads, str) and heads == "auto":
            return [None]
        return [*heads] if isinstance(heads, Sequence) and not isinstance(heads, str) else [heads]

    def _archive(self, share: float | None) -> dict[str, Any]:
        return {
            "archive": self.archive,
            "archive_pages": self.archive_pages,
            "archive_heads": share,
        }


@dataclass(frozen=True, kw_only=True)
class _Arguments(AdviceOptions):
    """The arguments of advise(), for type checkers."""

    path: str | os.PathLike[str] | ModelFile = field(kw_only=False)
    text: str | Questions = field(kw_only=False)
    progress: Progress = field(default=lambda n: None)


@function_with(_Arguments)
def advise(
    path: str | os.PathLike[str] | ModelFile,
    text: str | Questions,
    *,
    progress: Progress = lambda n: None,
    **options: Any,
) -> Advice:
    """Find the smallest cache in bytes whose loss of perplexity on `text` is acceptable.

    path, threads: as for Generator; runs on the CPU.
    text: typical input of the model; longer texts give more reliable results. Or questions with
        their answers: then the answers' perplexity is measured, and text_tokens has no effect.
    loss: the allowed relative increase of perplexity.
    policies: names from h2o_cpp.policy.POLICIES to compare.
    kv_dtypes: types of K and V, or pairs (K, V). The first is tried with every policy, the others
        with the best of them. Default: f16, and q8_0 if the head size is divisible by 32.
    n_ctx: tokens per window, each read into an empty cache; 0: the trained length; default: the
        trained length, at most 2048 and the length of the text, or of the longest question and
        answer.
    text_tokens: most tokens of the text to read; default: two windows.
    n_batch: tokens per chunk, each followed by eviction: 1 is as in decoding, more is faster.
    Where all questions begin with the same tokens, such as an instruction, the search is repeated
    with these protected, for the best policy and types.
    archive, archive_pages: as for Generator. If given, the search for the smallest cache is
        repeated with an archive for the best policy and types.
    archive_heads: shares of the KV heads to try, as for Generator. The advised one takes the fewest
        bytes of cache and archive together. None, "auto": 0.1, 0.2 and 1 if the model ranks its
        heads, otherwise all heads.

    The budget of each policy, in whole percents, is found by bisection. If perplexity does not
    always fall as the budget grows, a smaller budget may exist. The advised cache is measured, also
    on retrieving a number from a prompt of up to 1000 tokens after eviction.
    progress: called with the number of tokens read since the last call.

    Raises FileNotFoundError, ValueError (options, a text of less than 100 tokens) and MemoryError.
    """
    *_, last = advice_steps(path, text, make_options(AdviceOptions, options), progress)
    return last.advice


def advice_steps(
    path: str | os.PathLike[str] | ModelFile,
    text: str | Questions,
    options: AdviceOptions,
    progress: Progress = lambda n: None,
) -> Iterator[Step]:
    """Do as advise() does, with better and better answers: the first comes from 512 tokens of the
    text, read in chunks, the last from all of it."""
    model = open_model(path, device="cpu", threads=options.threads)
    sizes = (size for _, size in model.layer_heads)
    policies, types = options.policies, options.kv_dtypes or default_types(*sizes)
    loss, n_batch = options.loss, options.n_batch
    source = (
        TextQuality.of(model, text, options.n_ctx, options.text_tokens)
        if isinstance(text, str)
        else AnswerQuality.of(model, text, options.n_ctx)
    )
    archives = options.archives(model)
    if archives:
        open_session(  # raises if the model cannot have one
            model, Policy.full(), n_ctx=source.n_ctx, n_batch=1, **archives[0]
        )

    n_common = source.n_common if isinstance(source, AnswerQuality) else 0
    n_searches = len(policies) + len(types) - 1 + len(archives) + (n_common > 0)
    guesses: dict[str, int] = {}
    for one, chunk in ((source.first_part(), _FIRST_BATCH), (source, n_batch)):
        is_last = one is source
        search = BudgetSearch(
            model, one.quality, n_ctx=one.n_ctx, n_batch=min(max(chunk, n_batch), one.n_ctx),
            loss=loss, progress=progress,
        )  # fmt: skip
        costs = _Costs(model, one.n_ctx)
        best = search.full
        for n_done, best in enumerate(search.policies(policies, types, guesses), 1):
            if is_last:
                left = TRIALS * (n_searches - n_done) * search.seconds
                yield Step(_advice(search, best, None, costs, loss, is_final=False), left)
        guesses = search.least_percents()
        archived = search.archives(best, archives) if is_last and archives else None
        protected = None
        if is_last and best is not search.full and 0 < n_common < best.kept:
            protected = search.protected(best, n_common)
        found = _advice(search, best, archived, costs, loss, protected, is_final=is_last)
        left = 0.0
        if not is_last:
            speed = found.full_tokens_per_second * (1 if n_batch == 1 else chunk / 4)
            left = TRIALS * n_searches * source.n_tokens / speed
        yield Step(found, left)


def _advice(
    search: BudgetSearch,
    best: Trial,
    archived: Trial | None,
    costs: _Costs,
    most_loss: float,
    protected: Trial | None = None,
    *,
    is_final: bool,
) -> Advice:
    full = search.full
    needle = costs.needle(best)
    in_archive = None
    if needle.share is not None and needle.share < _LOST:
        with suppress(ValueError):  # a model, or a cache, without archives
            in_archive = costs.needle(best.with_archive("q8_0"))
    return Advice(
        model=costs.model.file.path,
        hh=best.budget,
        policy=best.policy,
        kv_dtype=best.kv_dtype,
        kept=best.kept,
        n_ctx=costs.n_ctx,
        tokens=best.tokens,
        loss=best.perplexity / full.perplexity - 1,
        most_loss=most_loss,
        perplexity=best.perplexity,
        full_perplexity=full.perplexity,
        cache_bytes=best.cache_bytes,
        full_cache_bytes=full.cache_bytes,
        needle=needle,
        tokens_per_second=costs.speed(best),
        full_tokens_per_second=costs.speed(full),
        backend=costs.model.backend,
        curve=tuple(search.curve),
        archived=None if archived is None else _archived(archived, full, costs),
        protected=protected,
        needle_in_archive=in_archive,
        is_final=is_final,
    )


def _archived(one: Trial, full: Trial, costs: _Costs) -> Archived:
    assert one.archive is not None
    return Archived(
        hh=one.budget,
        archive=one.archive,
        archive_pages=one.archive_pages,
        archive_heads=one.archive_heads,
        kept=one.kept,
        loss=one.perplexity / full.perplexity - 1,
        perplexity=one.perplexity,
        cache_bytes=one.cache_bytes,
        archive_bytes=one.archive_bytes,
        needle=costs.needle(one),
        tokens_per_second=costs.speed(one),
    )


class _Costs:
    """The costs of caches besides perplexity, each measured once."""

    def __init__(self, model: _core.Model, n_ctx: int) -> None:
        self.model = model
        self.n_ctx = n_ctx
        self.needle = cache(self._needle)
        self.speed = cache(self._speed)

    def _needle(self, one: Trial) -> Needle:
        """Log-likelihoods with a cache; the number is asked for after eviction."""
        length = min(self.n_ctx, _NEEDLE_TOKENS)
        samples = make_samples(Tokenizer.of_model(self.model), "needle", n=_NEEDLES, length=length)
        is_full = one.policy == "full"
        full, absent, *evicting = measure_retrieval(
            self.model,
            {"needle": samples},
            Comparison.of(
                [] if is_full else [one.policy],
                [] if is_full else [one.budget],
                n_ctx=length,
                n_batch=min(_NEEDLE_BATCH, length),
                kv_dtype=one.kv_dtype,
                **one.archive_options,
            ),
            question_apart=True,
        )
        found = evicting[0] if evicting else full
        return Needle(found.log_likelihood, full.log_likelihood, absent.log_likelihood)

    def _speed(self, one: Trial) -> float:
        """Tokens per second at the end of the context."""
        policy = Policy.full() if one.policy == "full" else named_policy(one.policy, one.kept)
        tokens = np.random.default_rng(0).integers(
            self.model.n_vocab, size=self.n_ctx, dtype=np.int32
        )
        session = open_session(
            self.model, policy, n_ctx=self.n_ctx, n_batch=min(512, self.n_ctx),
            kv_dtype=one.kv_dtype, **one.archive_options,
        )  # fmt: skip
        return 1 / median(decode_seconds(session, tokens, self.n_ctx - _DECODED))
