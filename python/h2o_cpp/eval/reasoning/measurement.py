"""How well a model solves problems with long traces while the cache evicts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import nan
from random import Random
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h2o_cpp.arguments import check_int
from h2o_cpp.budget.policy import Policy
from h2o_cpp.eval.reasoning.problems import Problem, make_problem
from h2o_cpp.generator import Generator
from h2o_cpp.measure.budgets import Budgeted, at_budgets
from h2o_cpp.measure.retrieval.measurement import standard_error
from h2o_cpp.options import ArchiveOptions

# An output that is this many times as long as the solution is cut off.
_MOST_LENGTHS = 2
_REPETITIONS = 3  # of a loop

Protected = Literal["none", "prompt"]
PROTECTED: tuple[Protected, ...] = ("none", "prompt")


@dataclass(frozen=True)
class Measurement:
    """A family of problems with one cache; without values where a protected prompt does not fit."""

    family: str
    policy: str
    protect: Protected
    budget: float  # fraction of the mean length of a problem with its solution
    kept: int  # tokens per layer and KV head
    longest_prompt: int  # tokens
    problems: int = 0
    accuracy: float = nan  # share of solved problems
    error: float = nan  # standard error of accuracy; nan for one problem
    of_full: float = nan  # difference of accuracy to the full cache
    of_full_error: float = nan  # of of_full, over pairs of outputs
    tokens: float = nan  # generated, relative to the full cache
    loops: float = nan  # share of outputs that end in a loop
    tokens_per_second: float = nan  # generated, of all sequences together


def make_problems(family: str, *, n: int, length: int, seed: int) -> list[Problem]:
    """Problems of about `length` tokens. Raises ValueError."""
    check_int("samples", n, 1)
    check_int("length", length, 48)
    random = Random(f"{family} {seed}")
    return [make_problem(family, random, length) for _ in range(n)]


def measure(
    path: str | os.PathLike[str],
    family: str,
    problems: Sequence[Problem],
    *,
    policies: Sequence[str],
    budgets: Sequence[float],
    protects: Sequence[Protected] = PROTECTED,
    **options: Any,
) -> Iterator[Measurement]:
    """Solve problems of a family with the full cache, then with every policy at every budget.

    path: a model that was trained on the family.
    budgets: fractions of the mean length of a problem with its solution.
    protects: whether the prompt is never evicted ("prompt") or treated as other tokens ("none").
    options: for Generator, except those of the cache's size. The full cache has no archive.

    Outputs are greedy. Raises as Generator does, and ValueError if a problem is longer than the
    model's context.
    """
    longest = max(len(p.prompt) + _MOST_LENGTHS * len(p.trace) for p in problems)
    mean_length = sum(len(p.prompt) + len(p.trace) for p in problems) // len(problems)
    whole = Budgeted("full", 1.0, mean_length, Policy.full())
    full: _Outputs | None = None
    longest_prompt = 0
    without_archive = options | vars(ArchiveOptions())
    for one in [whole, *at_budgets(policies, budgets, mean_length)]:
        some = options if full else without_archive
        with Generator(
            path, policy=one.policy, n_ctx=longest + 8, prefix_cache=0, **some
        ) as generator:
            longest_prompt = longest_prompt or max(
                len(generator.tokenize(problem.prompt)) for problem in problems
            )
            for protect in protects if full else PROTECTED[:1]:
                cache = Measurement(family, one.name, protect, one.budget, one.kept, longest_prompt)
                if protect == "prompt" and longest_prompt >= one.kept:
                    yield cache
                    continue
                outputs = _solve(generator, problems, protect)
                full = full or outputs
                yield _measured(cache, outputs, full)


class _Outputs(NamedTuple):
    """The outputs for n problems; arrays have the shape [n]."""

    solved: NDArray[np.bool_]
    tokens: NDArray[np.int64]
    loops: NDArray[np.bool_]
    seconds: float  # all together


def _solve(generator: Generator, problems: Sequence[Problem], protect: Protected) -> _Outputs:
    begin = perf_counter()
    found = generator.generate(
        [problem.prompt for problem in problems],
        each=[{"max_tokens": _MOST_LENGTHS * len(problem.trace)} for problem in problems],
        temperature=0,
        protect="prompt" if protect == "prompt" else None,
    )
    return _Outputs(
        np.array([p.solved(one.text) for p, one in zip(problems, found, strict=True)]),
        np.array([one.completion_tokens for one in found]),
        np.array([one.finish_reason == "length" and is_loop(one.text) for one in found]),
        perf_counter() - begin,
    )


def is_loop(text: str) -> bool:
    """Whether a text ends with three copies of a part."""
    lengths = range(1, len(text) // _REPETITIONS + 1)
    return any(text.endswith(text[-n:] * _REPETITIONS) for n in lengths)


def _measured(cache: Measurement, outputs: _Outputs, full: _Outputs) -> Measurement:
    gain = outputs.solved.astype(float) - full.solved
    return replace(
        cache,
        problems=len(gain),
        accuracy=float(outputs.solved.mean()),
        error=standard_error(outputs.solved.astype(float)),
        of_full=float(gain.mean()),
        of_full_error=standard_error(gain),
        tokens=float(outputs.tokens.sum() / max(1, full.tokens.sum())),
        loops=float(outputs.loops.mean()),
        tokens_per_second=float(outputs.tokens.sum() / outputs.seconds),
    )
