"""cache_memory: as many tokens as fit, in the best types."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_cpp import Generator, Policy
from h2o_cpp.arguments import KvDType
from h2o_cpp.budget.cache_memory import ModelShape, fit_cache, slab_bytes
from h2o_cpp.budget.policy import named_policy
from h2o_cpp.cli import main

SHAPE = ModelShape(4, 2, 64, 1024, can_roll=True)


def fit(
    memory: float | str,
    policy: str | None = None,
    *,
    shape: ModelShape = SHAPE,
    n_ctx: int = 1000,
    kv_dtype: KvDType | None = None,
) -> tuple[Policy, KvDType]:
    return fit_cache(shape, memory, policy, n_ctx=n_ctx, kv_dtype=kv_dtype, positions="auto")


def nbytes(policy: Policy, kv_dtype: KvDType, shape: ModelShape = SHAPE, n_ctx: int = 1000) -> int:
    return slab_bytes(shape, policy, n_ctx=n_ctx, kv_dtype=kv_dtype, positions="auto")


FULL = nbytes(Policy.full(), "f16")


@given(
    st.floats(0.02, 1),
    st.sampled_from(["h2o", "mean", "contribution", "question", "window", "sinks"]),
    st.sampled_from([None, "f16", "q8_0", ("q8_0", "q4_0")]),
    st.sampled_from([64, 96, 40]),
    st.booleans(),
)
def test_budget_is_largest_that_fits(
    share: float, name: str, kv_dtype: KvDType | None, head_dim: int, learned: bool
) -> None:
    if head_dim % 32 and kv_dtype is not None:
        kv_dtype = "f16"
    shape = ModelShape(3, 2, head_dim, 1024, learned)
    limit = share * nbytes(Policy.full(), "f16", shape)
    policy, chosen = fit(share, name, shape=shape, kv_dtype=kv_dtype)
    assert kv_dtype in (None, chosen)
    assert nbytes(policy, chosen, shape) <= limit
    if policy.budget is not None:
        assert policy == named_policy(name, policy.budget)
        if policy.budget < 999:
            assert nbytes(named_policy(name, policy.budget + 1), chosen, shape) > limit


@pytest.mark.parametrize(
    ("share", "kv_dtype"),
    [(1.0, "f16"), (0.999, "q8_0"), (0.55, "q8_0")],
)
def test_full_cache_in_widest_type_that_fits(share: float, kv_dtype: KvDType) -> None:
    assert fit(share) == (Policy.full(), kv_dtype)


def test_evicting_cache_uses_q8_0_and_best_policy() -> None:
    policy, kv_dtype = fit(0.1)
    assert kv_dtype == "q8_0"
    assert policy == named_policy("contribution", policy.budget or 0)
    in_f16, _ = fit(0.1, kv_dtype="f16")
    assert (policy.budget or 0) > 1.7 * (in_f16.budget or 0) > 0
    # Blocks of 32 do not divide a head of 40.
    assert fit(0.1, shape=ModelShape(4, 2, 40, 1024, can_roll=True))[1] == "f16"


def test_fraction_percent_and_bytes_are_equivalent() -> None:
    assert fit("10%") == fit(" 10.0 % ") == fit(0.1) == fit("0.1") == fit(" .10 ")
    assert fit(f"{FULL // 10}B") == fit(FULL // 10 / FULL)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (0, "expected a share above 0"),
        (1.5, "expected a share above 0"),
        ("0%", "expected a share above 0"),
        ("1.5", "cache_memory='1.5', expected a share above 0"),
        ("ten", "cache_memory='ten'"),
        ("12B", "12 bytes, expected at least"),
    ],
)
def test_invalid_memory_is_rejected(memory: float | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(memory)


def test_generator_stays_within_cache_memory(tiny_opt: Path) -> None:
    with Generator(tiny_opt, n_ctx=512, threads=1) as generator:
        full = generator.stats().cache_bytes
    with Generator(tiny_opt, n_ctx=512, cache_memory="10%", threads=1) as generator:
        assert 0.09 * full < generator.stats().cache_bytes <= 0.1 * full
        assert generator.generate("The old man", max_tokens=200, ignore_eos=True).text
        assert 0.09 * full < generator.stats().cache_bytes <= 0.1 * full
    with pytest.raises(ValueError, match="cannot be combined with hh, recent"):
        Generator(tiny_opt, cache_memory=0.1, hh=0.2)


def test_run_command_with_cache_memory(tiny_opt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "-m", str(tiny_opt), "-c", "256", "-n", "3", "--cache-memory", "20%", "It"]
    assert main([*arguments, "-t", "1"]) == 0
    assert capsys.readouterr().out
    assert main([*arguments, "--hh", "0.2"]) != 0
