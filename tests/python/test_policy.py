"""Policies, and budgets from hh and recent."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_cpp import Generator, Policy
from h2o_cpp.budget.policy import POLICIES, budget_policy

CASES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "h2o_cases.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(
    ("policy", "sinks", "heavy", "recent", "budget"),
    [
        (Policy.full(), 0, 0, None, None),
        (Policy.window(5), 0, 0, 5, 5),
        (Policy.sinks(4, 10), 4, 0, 10, 14),
        (Policy.sinks(4, 0), 4, 0, 0, 4),
        (Policy.sinks(0, 3), 0, 0, 3, 3),
        (Policy.h2o(3, 2), 0, 3, 2, 5),
        (Policy.h2o(3, 0), 0, 3, 0, 3),
        (Policy.h2o(0, 2), 0, 0, 2, 2),
        (Policy.h2o(heavy=3, recent=2, sinks=1), 1, 3, 2, 6),
    ],
)
def test_constructors(
    policy: Policy, sinks: int, heavy: int, recent: int | None, budget: int | None
) -> None:
    assert (policy.n_sinks, policy.n_heavy, policy.n_recent) == (sinks, heavy, recent)
    assert policy.budget == budget


def test_policies_compare_and_hash_by_value() -> None:
    assert Policy.h2o(3, 2) == Policy(n_heavy=3, n_recent=2)
    assert Policy.h2o(0, 2) == Policy.window(2) == Policy.sinks(0, 2)
    assert len({Policy.full(), Policy(), Policy.window(2), Policy.window(2)}) == 2
    distinct = [Policy.full(), Policy.window(2), Policy.window(3), Policy.h2o(2, 3)]
    distinct += [Policy.h2o(3, 2), Policy.sinks(3, 2), Policy.h2o(3, 2, sinks=1)]
    assert len(set(distinct)) == len(distinct)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy.full().n_heavy = 1  # type: ignore[misc]


MAKE: dict[str, Callable[[dict[str, int]], Policy]] = {
    "h2o": lambda config: Policy.h2o(config["heavy"], config["recent"]),
    "window": lambda config: Policy.window(config["recent"]),
    "sink": lambda config: Policy.sinks(config["sink"], config["recent"]),
}


@pytest.mark.parametrize("config", CASES["rejected_configs"], ids=str)
def test_rejected_configs(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(is 0|-1), expected"):
        MAKE[config["policy"]](config)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Policy.window(0),
        lambda: Policy.window(-1),
        lambda: Policy.window(2.0),  # type: ignore[arg-type]
        lambda: Policy.window("2"),  # type: ignore[arg-type]
        lambda: Policy.window(float("nan")),  # type: ignore[arg-type]
        lambda: Policy.sinks(-1, 4),
        lambda: Policy.sinks(4, -1),
        lambda: Policy.sinks(1.5, 4),  # type: ignore[arg-type]
        lambda: Policy.h2o(4, -1),
        lambda: Policy.h2o(4, 1, sinks=-1),
        lambda: Policy.h2o(0, 0, sinks=4),
        lambda: Policy.h2o(0.5, 4),  # type: ignore[arg-type]
        lambda: Policy(n_sinks=-1),
        lambda: Policy(n_heavy=-1),
        lambda: Policy(n_recent=-1),
        lambda: Policy(n_sinks=None),  # type: ignore[arg-type]
        lambda: Policy(n_heavy=None),  # type: ignore[arg-type]
    ],
)
def test_invalid_policies(make: Callable[[], Policy]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


@pytest.mark.parametrize("row", CASES["budget_from_ratio"], ids=str)
def test_fractions_are_truncated_as_in_the_h2o_code(row: dict[str, Any]) -> None:
    ratio, tokens, budget = row["ratio"], row["tokens"], row["budget"]
    if budget == 0:
        with pytest.raises(ValueError, match=r"hh=.*keeps no token"):
            budget_policy(ratio, None, tokens)
    else:
        policy = budget_policy(ratio, None, tokens)
        assert policy.budget == budget
        assert policy == Policy.h2o(heavy=budget // 2, recent=budget - budget // 2)
    # recent as a fraction of n_ctx, with hh = all of it
    policy = budget_policy(1.0, ratio, tokens)
    assert policy == Policy.h2o(heavy=tokens - budget, recent=budget)


@pytest.mark.parametrize(
    ("hh", "recent", "n_ctx", "heavy", "n_recent"),
    [
        (0.2, None, 2048, 204, 205),  # 409: the odd token is recent
        (1 / 2048, None, 2048, 0, 1),
        (2, None, 2048, 1, 1),
        (7, None, 2048, 3, 4),
        (1.0, None, 8, 4, 4),
        (8, 3, 2048, 5, 3),
        (8, 0, 2048, 8, 0),
        (8, 8, 2048, 0, 8),
        (0.5, 0.25, 100, 25, 25),
        (0.5, 10, 100, 40, 10),
        (50, 0.1, 100, 40, 10),
        (0.5, 0.0, 100, 50, 0),
        (0.5, 0.5, 100, 0, 50),
        (np.float32(0.5), np.int64(10), 100, 40, 10),
        (np.int32(50), np.float64(0.1), 100, 40, 10),
    ],
)
def test_hh_and_recent(
    hh: float, recent: float | None, n_ctx: int, heavy: int, n_recent: int
) -> None:
    assert budget_policy(hh, recent, n_ctx) == Policy.h2o(heavy=heavy, recent=n_recent)


@pytest.mark.parametrize("hh", [1, np.int64(1)])
def test_integer_one_is_rejected(hh: int) -> None:
    """Unlike 1.0, which means all of n_ctx."""
    with pytest.raises(ValueError, match=r"hh=1 is one token, expected 1\.0 for all of n_ctx"):
        budget_policy(hh, None, 2048)


def test_without_hh_is_the_full_cache() -> None:
    assert budget_policy(None, None, 2048) == Policy.full()


def test_more_tokens_than_n_ctx_are_the_full_cache() -> None:
    for name in (None, "window"):
        assert budget_policy(101, None, 100, name) == Policy.full()
        assert budget_policy(100, None, 100, name) != Policy.full()
        assert budget_policy(10**30, None, 100, name) == Policy.full()
    with pytest.raises(ValueError, match="policy='lru'"):
        budget_policy(101, None, 100, "lru")


@given(st.floats(0, 1), st.integers(1, 100_000))
def test_fractions_split_evenly(ratio: float, n_ctx: int) -> None:
    total = int(ratio * n_ctx)
    if total == 0:
        with pytest.raises(ValueError, match="hh="):
            budget_policy(ratio, None, n_ctx)
        return
    policy = budget_policy(ratio, None, n_ctx)
    assert policy.budget == total
    assert policy.n_recent is not None
    assert 0 <= policy.n_recent - policy.n_heavy <= 1


@pytest.mark.parametrize(
    "hh", [0, 0.0, -1, -0.1, 1.5, 1.0000001, 2.0, float("nan"), float("inf"), True, "0.2", 1j, []]
)
def test_bad_hh(tiny_opt: Path, hh: Any) -> None:
    with pytest.raises(ValueError, match=r"^hh="):
        budget_policy(hh, None, 2048)
    with pytest.raises(ValueError, match=r"^hh="):
        Generator(tiny_opt, hh=hh)


@pytest.mark.parametrize(
    "recent", [-1, -0.1, 1.5, 2.0, float("nan"), True, "1", 410, 0.5], ids=repr
)
def test_bad_recent(tiny_opt: Path, recent: Any) -> None:
    with pytest.raises(ValueError, match=r"^recent="):
        budget_policy(0.2, recent, 2048)
    with pytest.raises(ValueError, match=r"^recent="):
        Generator(tiny_opt, hh=0.2, recent=recent)


def test_recent_without_hh() -> None:
    with pytest.raises(ValueError, match="recent=3 is a part of hh, which is not given"):
        budget_policy(None, 3, 2048)


def test_generator_accepts_hh_of_n_ctx_or_a_policy(tiny_opt: Path) -> None:
    assert Generator(tiny_opt).policy == Policy.full()
    assert Generator(tiny_opt, hh=0.2).policy == Policy.h2o(204, 205)
    assert Generator(tiny_opt, hh=0.2, n_ctx=100).policy == Policy.h2o(10, 10)
    assert Generator(tiny_opt, hh=20, recent=5).policy == Policy.h2o(15, 5)
    assert Generator(tiny_opt, policy=Policy.sinks(4, 60)).policy == Policy.sinks(4, 60)
    for options in ({"hh": 0.2}, {"recent": 4}, {"hh": 0.2, "recent": 4}):
        with pytest.raises(ValueError, match="either a Policy or hh"):
            Generator(tiny_opt, policy=Policy.full(), **options)


@pytest.mark.parametrize("name", POLICIES)
def test_named_policies_have_budget_hh(tiny_opt: Path, name: str) -> None:
    with Generator(tiny_opt, hh=20, policy=name) as generator:
        assert generator.policy == POLICIES[name](20)
        assert POLICIES[name](20).budget == 20


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("h2o", Policy.h2o(10, 11)),
        ("window", Policy.window(21)),
        ("sinks", Policy.sinks(4, 17)),
        ("mean", Policy.h2o(10, 11, score="mean")),
        ("decay", Policy.h2o(10, 11, decay=0.99)),
        ("contribution", Policy.h2o(10, 11, score="mean", value_norm="output")),
        ("question", Policy.h2o(10, 11, score="question", decay=0.95, value_norm="output")),
        ("random", Policy.h2o(8, 9, sinks=4, score="random")),
    ],
)
def test_named_policies(name: str, policy: Policy) -> None:
    assert POLICIES[name](21) == policy


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "2", 2**31])
def test_named_policies_need_a_number_of_tokens(n: Any) -> None:
    with pytest.raises(ValueError, match=r"n=.*, expected an integer, 1"):
        POLICIES["window"](n)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "lru", "hh": 20}, "policy='lru', expected one of h2o, window"),
        ({"policy": "window"}, "'window' needs hh"),
        ({"policy": "window", "hh": 20, "recent": 5}, "either recent or policy='window'"),
    ],
)
def test_invalid_named_policies(tiny_opt: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Generator(tiny_opt, **options)
