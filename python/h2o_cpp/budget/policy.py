"""Policies: which tokens the cache keeps, and budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral, Real
from typing import Literal, get_args

from h2o_cpp import _core
from h2o_cpp.arguments import INT32_MAX, INT64_MAX, check_float, check_int

Score = Literal["sum", "mean", "inverse", "question", "random"]
ValueNorm = Literal["l1", "output"]


@dataclass(frozen=True)
class Policy:
    """The tokens that a cache keeps: the first `n_sinks`, the newest `n_recent`, and heavy hitters.

    Counts are tokens per layer and KV head, without the token being decoded. Use one of the
    constructors: `full`, `window`, `sinks`, `h2o`.

    Heavy hitters are the `n_heavy` of the other tokens with the largest scores. By default a score
    is the sum of the attention that the token has received, as in the paper. Options beyond it:

    score: "sum"; "mean": the sum divided by the number of tokens that could attend to it (RoCo,
        arXiv 2402.06262); "inverse": keep the smallest sums, for comparison; "question": the
        largest attention from one of the last 64 tokens of each chunk. If a chunk evicts more than
        one token, a token then takes the largest score among those that may be evicted within 12
        places of it (after SnapKV, arXiv 2404.14469); "random": no attention, but a random number,
        drawn again by position and KV head at each eviction (after arXiv 2609.03430): the baseline.
    decay: factor by which each token that counts reduces all scores, 0 to 1 (A2SF, arXiv
        2407.20485). With 0, a score is the attention of the newest token alone.
    value_norm: multiply scores by a norm of the token's value v: "l1": |v|_1 (VATP, arXiv
        2406.12335); "output": |W_O v|_2, how far v can move the layer's output, over the columns of
        W_O of all query heads that share the KV head.
    tail: positions (begin, end) that are kept too, as the end of a prompt; until they have been
        read, the newest tokens are more by their number.
    """

    n_sinks: int = 0
    n_heavy: int = 0
    n_recent: int | None = None  # None: unbounded
    score: Score = "sum"
    decay: float = 1.0
    value_norm: ValueNorm | None = None
    tail: tuple[int, int] | None = None

    def __repr__(self) -> str:
        """Shows only options that differ from the paper's."""
        shown = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name.startswith("n_") or getattr(self, f.name) != f.default
        ]
        return f"Policy({', '.join(shown)})"

    def __post_init__(self) -> None:
        check_int("n_sinks", self.n_sinks, 0, None)
        check_int("n_heavy", self.n_heavy, 0, None)
        if self.n_recent is not None:
            check_int("n_recent", self.n_recent, 0, None)
        if not 0 <= check_float("decay", self.decay) <= 1:
            raise ValueError(f"decay={self.decay!r}, expected 0 to 1")
        if self.score not in get_args(Score):
            raise ValueError(f"score={self.score!r}, expected one of {', '.join(get_args(Score))}")
        if self.value_norm not in (None, "l1", "output"):
            raise ValueError(f"value_norm={self.value_norm!r}, expected l1, output or None")
        if self.tail is not None:
            begin, end = self.tail
            check_int("tail", begin, self.n_sinks)
            check_int("tail", end, begin)

    @property
    def budget(self) -> int | None:
        """Tokens kept per KV head; None: all."""
        if self.n_recent is None:
            return None
        begin, end = self.tail or (0, 0)
        return self.n_sinks + self.n_heavy + self.n_recent + end - begin

    def core(self) -> _core.KvPolicy:
        """Returns the core's value, which counts in int32."""
        return _core.KvPolicy(
            sinks=min(self.n_sinks, INT32_MAX),
            heavy=min(self.n_heavy, INT32_MAX),
            recent=None if self.n_recent is None else min(self.n_recent, INT32_MAX),
            score=self.score,
            decay=float(self.decay),
            value_norm=self.value_norm,
            tail=self.tail or (0, 0),
        )

    @staticmethod
    def full() -> Policy:
        """Keep all tokens."""
        return Policy()

    @staticmethod
    def window(n: int) -> Policy:
        """Keep the newest n >= 1 tokens. Raises ValueError for n < 1."""
        return _non_empty(Policy(n_recent=n), "window: n")

    @staticmethod
    def sinks(n_sinks: int, n: int) -> Policy:
        """Keep the first n_sinks and the newest n tokens (StreamingLLM, arXiv 2309.17453)."""
        return _non_empty(Policy(n_sinks=n_sinks, n_recent=n), "sinks: n_sinks + n")

    @staticmethod
    def h2o(
        heavy: int,
        recent: int,
        sinks: int = 0,
        *,
        score: Score = "sum",
        decay: float = 1.0,
        value_norm: ValueNorm | None = None,
    ) -> Policy:
        """Keep the newest `recent` tokens, and of the others the `heavy` with the largest scores.

        sinks: also keep this many tokens at the beginning.
        score, decay, value_norm: as in the class; the defaults are the paper's.

        Raises ValueError for numbers out of range, and if heavy + recent is 0.
        """
        _non_empty(Policy(n_heavy=heavy, n_recent=recent), "h2o: heavy + recent")
        return Policy(sinks, heavy, recent, score, decay, value_norm)


def _non_empty(policy: Policy, what: str) -> Policy:
    if policy.budget == 0:
        raise ValueError(f"{what} is 0, expected at least 1")
    return policy


def named_policy(name: str, n: int) -> Policy:
    """The policy of this name that keeps n tokens. Raises ValueError for unknown names."""
    return _of_core(_core.named_policy(name, check_int("n", n, 1)))


def protected_policy(policy: Policy, n: int) -> Policy:
    """The policy with the same budget that never evicts the first n tokens.

    Raises ValueError unless the budget is larger.
    """
    return _of_core(_core.protected_policy(policy.core(), check_int("n", n, 0)))


# Policies that keep n tokens, by name.
POLICIES: Mapping[str, Callable[[int], Policy]] = {
    name: partial(named_policy, name) for name in _core.policy_names()
}


def _of_core(policy: _core.KvPolicy) -> Policy:
    return Policy(
        policy.sinks,
        policy.heavy,
        policy.recent,
        policy.score,
        round(policy.decay, 6),  # the core has a float32
        policy.value_norm,
        policy.tail if policy.tail[1] > policy.tail[0] else None,
    )


def budget_policy(
    hh: float | None, recent: float | None, n_ctx: int, name: str | None = None
) -> Policy:
    """The policy for `hh` and `recent`, each a fraction of n_ctx or a number of tokens.

    hh is the whole budget, as in the paper's "H2O (20%)": half heavy hitters and half recent
    tokens, unless `recent` or the policy's name says otherwise. Fractions are as in fraction_of().
    More tokens than n_ctx are the full cache, which needs no scores.
    """
    amounts = _amount("hh", hh), _amount("recent", recent)
    return _of_core(_core.budget_policy(*amounts, n_ctx, name))


def choose_policy(
    hh: float | None,
    recent: float | None,
    policy: str | Policy | Sequence[Policy] | None,
    n_ctx: int,
) -> Policy | Sequence[Policy]:
    """The policies for a Generator's arguments of these names."""
    if policy is None or isinstance(policy, str):
        return budget_policy(hh, recent, n_ctx, policy)
    if hh is not None or recent is not None:
        raise ValueError("give either a Policy or hh, not both")
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, Sequence) or not all(isinstance(one, Policy) for one in policy):
        raise TypeError(
            f"policy={policy!r}, expected a name, a Policy, or a list with a Policy per layer"
        )
    return [*policy]


def is_at_most_half(n: int, policy: Policy | Sequence[Policy]) -> bool:
    """Whether n tokens are at most half of the budget, of every layer's where they differ."""
    return all(one.budget is None or 2 * n <= one.budget for one in each(policy))


def has_budget(policy: Policy | Sequence[Policy]) -> bool:
    """Whether a layer may evict tokens."""
    return any(one.budget is not None for one in each(policy))


def core_policies(policy: Policy | Sequence[Policy]) -> list[_core.KvPolicy]:
    """Returns the core's one policy, or one per layer. Raises ValueError for an empty list."""
    policies = each(policy)
    if not policies:
        raise ValueError("policy is an empty list, expected one Policy per layer")
    return [one.core() for one in policies]


def fraction_of(n: int, fraction: float) -> int:
    """A fraction of n tokens, in whole tokens.

    The product in double precision is rounded down, as by the authors: 0.29 of 100 is 28.
    """
    return _core.fraction_of(n, float(fraction))


def each(policy: Policy | Sequence[Policy]) -> Sequence[Policy]:
    """The one policy of all layers, in a list, or the policies of the layers."""
    return [policy] if isinstance(policy, Policy) else policy


def _amount(name: str, value: float | None) -> float | None:
    """Returns the core's value: an int if a number of tokens, otherwise a float."""
    if value is None:
        return None
    if isinstance(value, Integral) and not isinstance(value, bool) and value >= 0:
        return min(int(value), INT64_MAX)
    if isinstance(value, Real) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise ValueError(f"{name}={value!r}, expected a fraction from 0 to 1 or a number of tokens")
