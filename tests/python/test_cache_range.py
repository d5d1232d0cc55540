"""The range of values that KVCache accepts; accepted values give finite results."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_cpp import KVCache, Policy
from h2o_cpp.cache import Rope

HEAD_DIM = 32
FLOAT_MAX = float(np.finfo(np.float32).max)
LARGEST = math.sqrt(FLOAT_MAX / HEAD_DIM) / 2
LARGEST_STORED = {
    "f32": FLOAT_MAX,
    "bf16": FLOAT_MAX,
    "f16": 65504.0,
    "q8_0": 127 * 65504.0,
    "q5_0": 16 * 65504.0,
    "q4_0": 8 * 65504.0,
}


def ones(n: int = 1) -> dict[str, Any]:
    return {
        "q": np.ones((n, 2, HEAD_DIM), np.float32),
        "k": np.ones((n, 1, HEAD_DIM), np.float32),
        "v": np.ones((n, 1, HEAD_DIM), np.float32),
    }


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, 1e30, -FLOAT_MAX, 1e300])
def test_values_out_of_range_are_rejected(name: str, value: float) -> None:
    cache = KVCache(2, 1, HEAD_DIM, Policy.h2o(3, 3), kv_dtype="f32", threads=1)
    cache.attend(**ones(4))
    before = cache.positions(), cache.scores()
    arrays = ones()
    if abs(value) > FLOAT_MAX:
        arrays[name] = arrays[name].astype(np.float64)
    arrays[name][0, 0, HEAD_DIM // 2] = value
    with pytest.raises(ValueError, match=rf"\[attend\] {name} has -?(nan|inf|1e\+30|3.4\d+e\+38)"):
        cache.attend(**arrays)
    assert len(cache) == 4
    for one, other in zip(before, (cache.positions(), cache.scores()), strict=True):
        np.testing.assert_array_equal(one, other)


def test_complex_numbers_are_rejected() -> None:
    cache = KVCache(2, 1, HEAD_DIM, Policy.window(3), threads=1)
    for name in "qkv":
        arrays = ones()
        with pytest.raises(ValueError, match=f"^{name} has complex numbers, expected real ones"):
            cache.attend(**{**arrays, name: arrays[name] * 1j})
    assert len(cache) == 0
    with pytest.raises(ValueError, match="sink_logits has complex numbers"):
        KVCache(2, 1, HEAD_DIM, Policy.window(3), sink_logits=[1j, 0])


@pytest.mark.parametrize("kv_dtype", LARGEST_STORED)
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("rope", [None, Rope()])
def test_range_depends_on_kv_dtype(kv_dtype: str, name: str, rope: Rope | None) -> None:
    limit = min(LARGEST, LARGEST_STORED[kv_dtype] / (1 if rope is None else math.sqrt(2)))
    for factor, fits in ((0.999, True), (1.001, False)):
        cache = KVCache(2, 1, HEAD_DIM, Policy.h2o(3, 3), kv_dtype=kv_dtype, rope=rope, threads=1)
        arrays = ones(9)
        arrays[name] *= np.float32(limit * factor)
        arrays[name][1::2] *= -1
        if fits:
            assert np.isfinite(cache.attend(**arrays)).all()
            assert np.isfinite(cache.scores()).all()
        else:
            with pytest.raises(ValueError, match=rf"{name} has -?\d.* expected finite numbers"):
                cache.attend(**arrays)


@given(
    kv_dtype=st.sampled_from(sorted(LARGEST_STORED)),
    exponents=st.tuples(*[st.floats(-30, 0)] * 3),
    value_norm=st.sampled_from([None, "l1"]),
    rolling=st.booleans(),
    n=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_values_in_range_give_finite_results(
    kv_dtype: str,
    exponents: tuple[float, float, float],
    value_norm: Literal["l1"] | None,
    rolling: bool,
    n: int,
    seed: int,
) -> None:
    """For any magnitude; the probabilities of every row sum to 1."""
    random = np.random.default_rng(seed)
    policy = Policy.h2o(3, 3, value_norm=value_norm)
    rope = Rope(positions="rolling") if rolling else None
    cache = KVCache(2, 1, HEAD_DIM, policy, kv_dtype=kv_dtype, rope=rope, threads=1)
    largest = [LARGEST] + 2 * [min(LARGEST, LARGEST_STORED[kv_dtype] / math.sqrt(2))]
    for _ in range(3):
        arrays = ones(n)
        for name, most, exponent in zip(arrays, largest, exponents, strict=True):
            shape = arrays[name].shape
            arrays[name] = (random.uniform(-1, 1, shape) * most * 0.999 * 10**exponent).astype("f")
        out = cache.attend(**arrays)
        assert np.isfinite(out).all()
        assert np.isfinite(cache.scores()).all()
    if len(cache) <= 6:  # no evictions yet
        assert cache.scores().sum() == pytest.approx(2 * len(cache), rel=1e-3)
