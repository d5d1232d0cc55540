"""Caches with budgets, measured to find the smallest whose loss is acceptable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from time import monotonic
from typing import Any

from h2o_cpp import _core
from h2o_cpp.arguments import KvDType
from h2o_cpp.budget.policy import Policy, fraction_of, protected_policy
from h2o_cpp.measure.budgets import Budgeted, at_budgets
from h2o_cpp.measure.perplexity import Measurement
from h2o_cpp.model.session import open_session

# The perplexity in a session, and the number of predicted tokens; calls its second argument with
# the number of tokens read since the last call.
Quality = Callable[[_core.Session, Callable[[int], object]], tuple[float, int]]

TRIALS = 5  # of one search, about


@dataclass(frozen=True)
class Trial(Measurement):
    """Perplexity with one policy and types of K and V."""

    kv_dtype: KvDType = "f16"
    archive: KvDType | None = None  # types of the archive; None: no archive
    archive_pages: int | None = None  # None: default
    archive_heads: float | None = None  # share of the KV heads; None: all
    protect: int = 0  # the first tokens, which are never evicted

    @property
    def archive_options(self) -> dict[str, Any]:
        """The options of its archive, as for Generator."""
        return {
            "archive": self.archive,
            "archive_pages": self.archive_pages,
            "archive_heads": self.archive_heads,
        }

    def with_archive(self, archive: KvDType) -> Trial:
        """The same cache with an archive, not measured."""
        return replace(self, archive=archive, archive_pages=None, archive_heads=None)

    @property
    def all_bytes(self) -> int:
        """Bytes of the cache and the archive."""
        return self.cache_bytes + self.archive_bytes


class BudgetSearch:
    """Searches budgets, in whole percents of n_ctx, with a policy each; `curve` has all trials."""

    def __init__(
        self,
        model: _core.Model,
        quality: Quality,
        *,
        n_ctx: int,
        n_batch: int,
        loss: float,
        progress: Callable[[int], object],
    ) -> None:
        """Measure the full cache; quality: of a session's cache. loss: what is acceptable."""
        self._model = model
        self._quality = quality
        self._n_ctx = n_ctx
        self._n_batch = n_batch
        self._loss = loss
        self._progress = progress
        began = monotonic()
        self.full = self._measure(Budgeted("full", 1.0, n_ctx, Policy.full()))
        self.seconds = monotonic() - began  # of a trial
        self.curve = [self.full]

    def least_percents(self) -> dict[str, int]:
        """The smallest acceptable budget of each policy that was searched."""
        good = filter(self._is_good, sorted(self.curve[1:], key=lambda one: -one.budget))
        return {one.policy: round(100 * one.budget) for one in good if one.kv_dtype == "f16"}

    def policies(
        self,
        policies: Sequence[str],
        types: Sequence[KvDType],
        guesses: Mapping[str, int],
    ) -> Iterator[Trial]:
        """Search with every policy in the first type, then with the best one in the others.

        guesses: percents that may be the least with each policy. Yields the smallest cache so far
        after each search.
        """
        best = self.full
        for kv_dtype in types:
            whole = self.full
            if kv_dtype != "f16":
                whole = self._measure(Budgeted("full", 1.0, self._n_ctx, Policy.full(), kv_dtype))
            if not self._is_good(whole):  # nor will smaller budgets be
                self.curve.append(whole)
                continue
            for name in policies if best is self.full else [best.policy]:
                self._search(name, whole, guesses.get(name))
                best = self._smallest(self.curve[1:])
                yield best

    def archives(self, best: Trial, archives: Sequence[Mapping[str, Any]]) -> Trial:
        """The cache with the fewest bytes in all, whose evicted tokens are archived.

        best: has its policy and types. archives: options of an archive, those with more bytes last.
        """
        whole = next(one for one in self.curve if (one.budget, one.kv_dtype) == (1, best.kv_dtype))
        candidates: list[Trial] = []
        enough = 100
        for options in archives:  # a larger one is better only with a smaller budget
            trials = self._search(best.policy, replace(whole, **options), good=enough)
            if any(map(self._is_good, trials)):
                candidates.append(self._smallest(trials))
                enough = round(100 * candidates[-1].budget)
        return min(candidates, key=lambda one: one.all_bytes)

    def protected(self, best: Trial, n: int) -> Trial | None:
        """The smallest cache that never evicts the first n tokens; None if not below `best`.

        best: has its policy and types.
        """
        whole = replace(best, budget=1.0, protect=n)
        trials = self._search(best.policy, whole, good=round(100 * best.budget))
        smallest = min(filter(self._is_good, trials), key=lambda one: one.cache_bytes, default=None)
        return smallest if smallest is not None and smallest.kept < best.kept else None

    def _measure(self, one: Budgeted, protect: int = 0, **archive: Any) -> Trial:
        policy = protected_policy(one.policy, protect) if protect else one.policy
        session = open_session(
            self._model, policy, n_ctx=self._n_ctx, n_batch=self._n_batch, kv_dtype=one.kv_dtype,
            **archive,
        )  # fmt: skip
        value, n = self._quality(session, self._progress)
        return Trial(
            one.name, one.budget, one.kept, value, n, session.cache_bytes, session.archive_bytes,
            kv_dtype=one.kv_dtype, protect=protect, **archive,
        )  # fmt: skip

    def _is_good(self, one: Trial) -> bool:
        return one.perplexity <= self.full.perplexity * (1 + self._loss)

    def _smallest(self, trials: Sequence[Trial]) -> Trial:
        return min(filter(self._is_good, trials), key=lambda one: (one.cache_bytes, one.perplexity))

    def _search(
        self, name: str, whole: Trial, guess: int | None = None, good: int = 100
    ) -> list[Trial]:
        """The measured budgets; `whole` is the trial without eviction.

        good: percents known to be enough; only smaller budgets are tried.
        """
        found = {100: replace(whole, policy=name)} if good == 100 else {}
        # The largest budget that has no room besides the protected tokens.
        bad = max(p for p in range(good) if fraction_of(self._n_ctx, p / 100) <= whole.protect)
        while good - bad > 1:
            percent = _between(bad, good, guess)
            (one,) = at_budgets([name], [percent / 100], self._n_ctx, whole.kv_dtype)
            found[percent] = self._measure(one, whole.protect, **whole.archive_options)
            if self._is_good(found[percent]):
                good = percent
            else:
                bad = percent
        trials = [found[percent] for percent in sorted(found)]
        self.curve += trials
        return trials


def _between(bad: int, good: int, guess: int | None) -> int:
    """Percents to try next: around a guess at first, then the geometric mean."""
    if guess is not None:
        step = max(1, guess // 8)
        for percent in (guess, guess - step, guess + step):
            if bad < percent < good:
                return percent
    return min(max(round(sqrt(max(bad, 1) * good)), bad + 1), good - 1)
