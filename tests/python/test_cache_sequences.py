"""Several sequences in one KVCache are independent, each with its own policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_cpp import KVCache, Policy, Rope
from support.random_texts import POLICIES, Text, texts


@given(texts(), st.lists(POLICIES, min_size=2, max_size=3), st.integers(0, 2**32 - 1))
def test_sequences_equal_separate_caches(text: Text, policies: list[Policy], seed: int) -> None:
    """Each has its own policy; batches of any lengths, with reuse after reset."""
    random = np.random.default_rng(seed)
    largest = Policy.h2o(20, 20, 20)  # slots and scores for any of `policies`
    sizes = (text.n_heads, text.n_kv_heads, text.head_dim)
    policies = [Policy.window(8) if p.budget is None else p for p in policies]
    together = KVCache(*sizes, largest, n_sequences=len(policies), kv_dtype="f32")
    for _ in range(2):
        alone = [KVCache(*sizes, p, kv_dtype="f32") for p in policies]
        for s, policy in enumerate(policies):
            together.reset(s, policy)
        for _ in range(6):
            chosen = random.permutation(len(policies))[: random.integers(1, len(policies) + 1)]
            lengths = {int(s): int(random.integers(1, 12)) for s in chosen}
            q, k, v = (
                random.normal(size=(sum(lengths.values()), heads, text.head_dim))
                for heads in (text.n_heads, text.n_kv_heads, text.n_kv_heads)
            )
            out = together.attend(q, k, v, lengths)
            begin = 0
            for s, n in lengths.items():
                rows = slice(begin, begin + n)
                np.testing.assert_array_equal(out[rows], alone[s].attend(q[rows], k[rows], v[rows]))
                begin += n
                for g in range(text.n_kv_heads):
                    np.testing.assert_array_equal(
                        together.positions(g, sequence=s), alone[s].positions(g)
                    )
                    np.testing.assert_array_equal(
                        together.scores(g, sequence=s), alone[s].scores(g)
                    )
        assert together.tokens_seen(0) == len(alone[0])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({0: 1, 2: 1}, "sequence 2, the cache has 2"),
        ({0: 2, 1: 1}, "3 rows, q has 2"),
        ({0: 2, 1: 0}, "sequence 1 has no rows"),
        ({}, "0 rows, q has 2"),
    ],
)
def test_invalid_lengths_are_rejected(lengths: dict[int, int], message: str) -> None:
    cache = KVCache(2, 1, 4, Policy.window(4), n_sequences=2)
    q, kv = np.zeros((2, 2, 4)), np.zeros((2, 1, 4))
    with pytest.raises(ValueError, match=message):
        cache.attend(q, kv, kv, lengths)
    assert cache.tokens_seen(0) == cache.tokens_seen(1) == 0


def test_policies_larger_than_the_slots_are_rejected() -> None:
    cache = KVCache(2, 1, 4, Policy.h2o(4, 4))
    for policy in (Policy.window(9), Policy.h2o(5, 4), Policy.full()):
        with pytest.raises(
            ValueError, match="the cache has slots for 8; create it with max_tokens"
        ):
            cache.reset(policy=policy)
    cache.reset(policy=Policy.window(8))
    for _ in range(20):
        cache.attend(np.ones((1, 2, 4)), np.ones((1, 1, 4)), np.ones((1, 1, 4)))
    rows = np.ones((2, 1, 4))
    with pytest.raises(TypeError, match="expected a dict of sequences"):
        cache.attend(np.ones((2, 2, 4)), rows, rows, lengths=[2])  # type: ignore[arg-type]


def test_incompatible_policies_are_rejected() -> None:
    cache = KVCache(2, 1, 4, Policy.window(4), max_tokens=100)
    with pytest.raises(ValueError, match="needs 6 slots, layer 0 has 5"):
        cache.reset(0, Policy.window(5))
    with pytest.raises(ValueError, match="needs scores"):
        cache.reset(0, Policy.h2o(2, 2))
    with pytest.raises(ValueError, match="cannot roll: that needs a cache with rolling positions"):
        KVCache(2, 1, 4, Policy.full(), max_tokens=9, rope=Rope(positions="rolling"))
    for rope in (Rope(layout="thirds"), Rope(positions="relative")):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="expected"):
            KVCache(2, 1, 4, Policy.window(4), rope=rope)
    for rope in (Rope(n_rot=6), Rope(n_rot=3), Rope(theta=0), Rope(theta=float("inf"))):
        with pytest.raises(ValueError, match="expected"):
            KVCache(2, 1, 4, Policy.window(4), rope=rope)
    rolling = KVCache(2, 1, 4, Policy.window(4), rope=Rope(positions="rolling"), max_tokens=99)
    rolling.attend(np.ones((6, 2, 4)), np.ones((6, 1, 4)), np.ones((6, 1, 4)))
    with pytest.raises(ValueError, match="needs 99 slots"):
        rolling.reset(0, Policy.full())
    assert (len(rolling), rolling.policy) == (6, Policy.window(4))  # unchanged
