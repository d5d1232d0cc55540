"""KVCache equals h2o_rules for random shapes, budgets and chunks; its invariants."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from h2o_cpp import KVCache, Policy, Rope
from support.h2o_rules import ReferenceCache
from support.random_texts import OPTIONS, POLICIES, PROTECTED, Text, texts


def assert_same_state(a: KVCache, b: KVCache, n_kv_heads: int) -> None:
    for g in range(n_kv_heads):
        np.testing.assert_array_equal(a.positions(g), b.positions(g))
        np.testing.assert_array_equal(a.scores(g), b.scores(g))


@given(texts(), POLICIES)
def test_policies_equal_reference(device: str, text: Text, policy: Policy) -> None:
    assert_equals_reference(device, text, policy, None)


@given(texts(), OPTIONS)
def test_score_options_equal_reference(device: str, text: Text, policy: Policy) -> None:
    assert_equals_reference(device, text, policy, None)


@given(texts(), PROTECTED)
def test_protected_tokens_equal_reference(device: str, text: Text, policy: Policy) -> None:
    assert_equals_reference(device, text, policy, None)


@given(
    texts(),
    st.one_of(POLICIES, OPTIONS, PROTECTED),
    st.integers(1, 20),
    st.integers(0, 1),
    st.sampled_from(["halves", "pairs"]),
    st.sampled_from(["original", "rolling"]),
)
def test_rotary_embeddings_equal_reference(
    device: str,
    text: Text,
    policy: Policy,
    half: int,
    unrotated: int,
    layout: Literal["halves", "pairs"],
    positions: Literal["original", "rolling"],
) -> None:
    if policy.budget is None or policy.budget >= text.n:
        positions = "original"  # rolling positions need evictions
    rope = Rope(theta=100.0, n_rot=2 * half, layout=layout, positions=positions)
    assert_equals_reference(device, replace(text, head_dim=2 * half + unrotated), policy, rope)


@given(texts(), st.integers(1, 6), st.integers(0, 6), st.sampled_from(["sum", "mean"]))
def test_output_norms_equal_reference(
    device: str, text: Text, heavy: int, recent: int, score: Literal["sum", "mean"]
) -> None:
    assert_equals_reference(
        device, text, Policy.h2o(heavy, recent, score=score, value_norm="output"), None
    )


@given(
    texts(),
    st.lists(st.integers(1, 120), min_size=1, max_size=4),
    st.integers(1, 60),
    st.integers(0, 6),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([None, "l1", "output"]),
)
def test_question_scores_equal_reference(
    device: str,
    text: Text,
    chunks: list[int],
    heavy: int,
    recent: int,
    decay: float,
    value_norm: Literal["l1", "output"] | None,
) -> None:
    policy = Policy.h2o(heavy, recent, score="question", decay=decay, value_norm=value_norm)
    assert_equals_reference(device, replace(text, chunks=chunks), policy, None)


def test_question_score_keeps_tokens_attended_by_last_64() -> None:
    """It keeps the token that the last 64 queries attend to, with its neighbors; sum does not."""
    head_dim, n = 4, 200
    q, k, v = (np.zeros((n, 1, head_dim), np.float32) for _ in range(3))
    k[20], k[100] = [8, 0, 0, 0], [0, 8, 0, 0]
    q[:136], q[136:] = [4, 0, 0, 0], [0, 4, 0, 0]
    kept = []
    for policy in (Policy.h2o(25, 3), Policy.h2o(25, 3, score="question")):
        cache = KVCache(1, 1, head_dim, policy, max_tokens=n)
        cache.attend(q, k, v)
        kept.append(cache.positions().tolist())
    assert 20 in kept[0]
    assert kept[1] == [*range(88, 113), 197, 198, 199]


def test_question_score_is_the_largest_attention() -> None:
    """A token that one query needs is kept rather than one to which all attend a little."""
    head_dim, n = 4, 200
    q, k, v = (np.zeros((n, 1, head_dim), np.float32) for _ in range(3))
    k[50], k[100] = [8, 0, 0, 0], [0, 8, 0, 0]
    q[:, 0, 0] = 1.8  # e^(8 * 1.8 / 2) = 1339: 9 in 10 parts of attention
    q[180] = [0, 4, 0, 0]  # all of it

    def kept(decay: float) -> list[int]:
        cache = KVCache(
            1, 1, head_dim, Policy.h2o(25, 3, score="question", decay=decay), max_tokens=n
        )
        cache.attend(q, k, v)
        return list(cache.positions())

    assert kept(1.0) == [*range(88, 113), 197, 198, 199]
    assert kept(0.95) == [*range(38, 63), 197, 198, 199]  # the last query counts most


def test_output_norm_needs_output_weight() -> None:
    policy = Policy.h2o(2, 2, value_norm="output")
    with pytest.raises(ValueError, match="W_O"):
        KVCache(2, 1, 4, policy)
    with pytest.raises(ValueError, match=r"output_weight has shape \(3, 4\), expected \(n, 8\)"):
        KVCache(2, 1, 4, policy, output_weight=np.ones((3, 4), np.float32))
    cache = KVCache(2, 1, 4, Policy.h2o(2, 2, value_norm="l1"))
    with pytest.raises(ValueError, match="W_O"):
        cache.reset(policy=policy)


def assert_equals_reference(device: str, text: Text, policy: Policy, rope: Rope | None) -> None:
    weight = text.output_weight() if policy.value_norm == "output" else None
    cache = text.cache(policy, rope=rope, device=device, output_weight=weight)
    reference = ReferenceCache(
        text.n_heads,
        text.n_kv_heads,
        policy,
        rope,
        None if weight is None else weight.astype(np.float64),
    )
    q, k, v = text.arrays()
    done = 0
    for n in text.chunks:
        rows = slice(done, done + n)
        expected = reference.attend(*(x[rows].astype(np.float64) for x in (q, k, v)))
        # An eviction between scores that float32 cannot distinguish may legitimately differ.
        # The norm of a value is at most 40 * 5.
        assume(reference.margin > (1e-4 if not policy.value_norm else 2e-2))
        out = cache.attend(q[rows], k[rows], v[rows])
        done += n
        # Logits are below 2 * 40 * 4 with 40 roundings of 2^-24: the error of e^logit is at most
        # about 1e-4, 1e-5 in practice, and probabilities are at most 1.
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)
        for g, kept in enumerate(reference.heads):
            assert cache.positions(g).tolist() == [e.position for e in kept]
            if policy.n_heavy > 0:
                np.testing.assert_allclose(
                    cache.scores(g), [e.score for e in kept], rtol=0, atol=1e-4
                )


@given(texts(), POLICIES)
def test_kept_tokens_satisfy_policy(text: Text, policy: Policy) -> None:
    cache = text.cache(policy)
    q, k, v = text.arrays()
    before: list[set[int]] = [set()] * text.n_kv_heads
    nbytes = cache.nbytes
    done = 0
    for n in text.chunks:
        cache.attend(q[done : done + n], k[done : done + n], v[done : done + n])
        done += n
        for g in range(text.n_kv_heads):
            kept = cache.positions(g).tolist()
            assert kept == sorted(set(kept))
            assert len(kept) == (done if policy.budget is None else min(done, policy.budget))
            assert set(kept) <= before[g] | set(range(done - n, done))  # no evicted token returns
            assert set(range(min(policy.n_sinks, done))) <= set(kept)
            recent = done if policy.n_recent is None else min(done, policy.n_recent)
            assert set(range(done - recent, done)) <= set(kept)
            before[g] = set(kept)
        assert cache.nbytes == nbytes
        assert len(cache) == done


@given(texts(), st.integers(0, 6), st.sampled_from(["f32", "f16", "bf16"]))
def test_unreached_budget_equals_full_cache_bit_for_bit(
    text: Text, heavy: int, kv_dtype: str
) -> None:
    policy = Policy.h2o(heavy, max(text.n - heavy, 1))
    bounded, full = text.cache(policy, kv_dtype), text.cache(Policy.full(), kv_dtype)
    np.testing.assert_array_equal(text.run(bounded), text.run(full))


@given(texts(), POLICIES, st.sampled_from(["f32", "f16", "bf16"]))
def test_threads_do_not_change_results(text: Text, policy: Policy, kv_dtype: str) -> None:
    one, two = (text.cache(policy, kv_dtype, threads=n) for n in (1, 2))
    np.testing.assert_array_equal(text.run(one), text.run(two))
    assert_same_state(one, two, text.n_kv_heads)


@given(texts(), POLICIES)
def test_reset_cache_equals_fresh_cache(text: Text, policy: Policy) -> None:
    used, fresh = text.cache(policy), text.cache(policy)
    text.run(used)
    used.reset()
    assert len(used) == 0
    assert used.positions().size == 0
    np.testing.assert_array_equal(text.run(used), text.run(fresh))
    assert_same_state(used, fresh, text.n_kv_heads)


@given(texts(), st.integers(1, 8))
def test_h2o_without_heavy_hitters_equals_window(text: Text, n: int) -> None:
    window, h2o = text.cache(Policy.window(n)), text.cache(Policy.h2o(0, n))
    np.testing.assert_array_equal(text.run(window), text.run(h2o))
    assert_same_state(window, h2o, text.n_kv_heads)


@given(texts())
def test_every_query_adds_one_to_the_scores(text: Text) -> None:
    cache = text.cache(Policy.h2o(1, text.n))  # keeps scores, evicts nothing
    text.run(cache)
    for g in range(text.n_kv_heads):
        queries = text.n * text.n_heads / text.n_kv_heads
        # Each of the n scores is a sum of at most n * group probabilities.
        assert cache.scores(g).sum() == pytest.approx(queries, rel=text.n * 2**-20)


@given(texts(), st.sampled_from([("f16", 2.0**-11), ("bf16", 2.0**-8)]))
def test_f16_and_bf16_caches_store_rounded_values(text: Text, kind: tuple[str, float]) -> None:
    """Bit for bit equal to an f32 cache of rounded keys and values."""
    kv_dtype, unit = kind
    q, k, v = text.arrays()

    def rounded(x: NDArray[np.float32]) -> NDArray[np.float32]:
        if kv_dtype == "f16":
            return x.astype(np.float16).astype(np.float32)
        bits = x.view(np.uint32)
        to_even = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
        result: NDArray[np.float32] = (to_even & np.uint32(0xFFFF0000)).view(np.float32)
        return result

    assert np.all(np.abs(rounded(k) - k) <= unit * np.abs(k) + 2.0**-24)
    small, large = text.cache(Policy.full(), kv_dtype), text.cache(Policy.full(), "f32")
    np.testing.assert_array_equal(small.attend(q, k, v), large.attend(q, rounded(k), rounded(v)))


BLOCK_TYPES = {
    "q8_0": GGMLQuantizationType.Q8_0,
    "q5_0": GGMLQuantizationType.Q5_0,
    "q4_0": GGMLQuantizationType.Q4_0,
}


@given(
    texts(),
    st.sampled_from([32, 64, 96]),
    POLICIES,
    st.tuples(*[st.sampled_from(["q8_0", "q5_0", "q4_0", "f32"])] * 2),
)
def test_quantized_caches_store_values_quantized_like_gguf_py(
    text: Text, head_dim: int, policy: Policy, kv_dtype: tuple[str, str]
) -> None:
    """Bit for bit equal to an f32 cache of the quantized keys and values."""
    text = replace(text, head_dim=head_dim)

    def rounded(x: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
        if dtype == "f32":
            return x
        blocks = quants.quantize(x, BLOCK_TYPES[dtype])
        return quants.dequantize(blocks, BLOCK_TYPES[dtype]).reshape(x.shape)

    q, k, v = text.arrays()
    small, large = text.cache(policy, kv_dtype), text.cache(policy, "f32")
    rounded_k, rounded_v = rounded(k, kv_dtype[0]), rounded(v, kv_dtype[1])
    done = 0
    for n in text.chunks:
        rows = slice(done, done + n)
        np.testing.assert_array_equal(
            small.attend(q[rows], k[rows], v[rows]),
            large.attend(q[rows], rounded_k[rows], rounded_v[rows]),
        )
        done += n
    assert_same_state(small, large, text.n_kv_heads)
    bits = {"f32": 32, "q8_0": 8.5, "q5_0": 5.5, "q4_0": 4.5}
    slots = text.n if policy.budget is None else min(policy.budget + 1, text.n)
    saved = sum((32 - bits[dtype]) / 8 for dtype in kv_dtype) * text.n_kv_heads * slots * head_dim
    assert abs(large.nbytes - small.nbytes - saved) < 2 * 64  # arrays are aligned to cache lines


def test_block_types_need_whole_blocks() -> None:
    with pytest.raises(ValueError, match="head_dim is 48, expected a multiple of 32 for type Q8_0"):
        KVCache(1, 1, 48, Policy.window(4), kv_dtype=("f16", "q8_0"))


def test_nbytes_equals_formula() -> None:
    n_kv_heads, head_dim, policy = 4, 64, Policy.h2o(32, 31)
    slots = 64  # the budget and the token being decoded
    for kv_dtype, size in (("f32", 4), ("f16", 2), ("bf16", 2)):
        cache = KVCache(8, n_kv_heads, head_dim, policy, kv_dtype=kv_dtype)
        kv = 2 * n_kv_heads * slots * head_dim * size
        position_and_score = n_kv_heads * slots * 8
        next_slots, policies = 64, 64  # four int32, and a policy: a cache line each
        assert cache.nbytes == kv + position_and_score + next_slots + policies


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 3, 4), (2, 2, 4), (2, 2, 4)], "q has shape"),
        ([(2, 4, 4), (1, 2, 4), (2, 2, 4)], "k has shape"),
        ([(2, 4, 4), (2, 2, 4), (2, 2, 5)], "v has shape"),
        ([(0, 4, 4), (0, 2, 4), (0, 2, 4)], "no rows"),
        ([(4, 4), (2, 4), (2, 4)], "q has shape"),
        ([(9, 4, 4), (9, 2, 4), (9, 2, 4)], "room for 8"),
    ],
)
def test_invalid_arrays_are_rejected(shapes: list[tuple[int, ...]], message: str) -> None:
    cache = KVCache(4, 2, 4, Policy.full(), max_tokens=8)
    q, k, v = (np.zeros(shape, np.float32) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        cache.attend(q, k, v)
    assert len(cache) == 0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 1, 4), {}, "n_heads=0"),
        ((4, 3, 4), {}, "evenly"),
        ((4, 2, 0), {}, "head_dim=0"),
        ((4, 2, 2**40), {}, "head_dim="),
        ((4, 2, 4), {"max_tokens": 0}, "max_tokens"),
        ((4, 2, 4), {"kv_dtype": "f64"}, "kv_dtype"),
        ((4, 2, 32), {"kv_dtype": "q5_1"}, "kv_dtype"),
        ((4, 2, 32), {"kv_dtype": ("f16",)}, "kv_dtype"),
        ((4, 2, 4), {"device": "tpu"}, "tpu"),
        ((4, 2, 4), {"device": "cuda:x"}, "cuda:x"),
        ((4, 2, 4), {"threads": -1}, "threads"),
    ],
)
def test_invalid_options_are_rejected(
    arguments: tuple[int, int, int], options: dict[str, int | str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        KVCache(*arguments, Policy.window(4), **options)  # type: ignore[arg-type]


def test_full_policy_needs_max_tokens() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        KVCache(1, 1, 4, Policy.full())


def test_huge_cache_is_memory_error() -> None:
    with pytest.raises(MemoryError, match=r"bytes|memory"):
        KVCache(1024, 1024, 1024, Policy.full(), max_tokens=2**30)
