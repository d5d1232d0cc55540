"""Position encodings: the two lengths of LongRoPE, and ALiBi."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator, KVCache, Policy, Rope
from support.converted_files import make_file
from support.h2o_rules import ReferenceCache
from support.needs import packages
from support.random_models import (
    RECIPES,
    float32_tolerance,
    make_model,
    random_tokens,
    reference_logits,
)


@packages("torch", "transformers")
def test_longrope_factors_depend_on_n_ctx(tmp_path: Path) -> None:
    """Short factors up to original_max_position_embeddings = 80, whatever the prompt length."""
    original: dict[str, Any] = {"original_max_position_embeddings": 80}
    recipe = RECIPES["phi3_longrope"]
    recipe = replace(recipe, n_ctx=160, options=recipe.options | original)
    model = make_model(recipe, 2)
    path = make_file(model, tmp_path)
    tokens = random_tokens(2)
    expected = reference_logits(model, tokens)
    tolerance = float32_tolerance(recipe, expected)
    for n_ctx, is_short in ((40, True), (80, True), (81, False), (160, False)):
        with Generator(path, kv_dtype="f32", n_ctx=n_ctx) as generator:
            error = np.abs(generator.logits(tokens) - expected).max()
        assert (error < tolerance) == is_short


@pytest.mark.parametrize("rope", [None, Rope(theta=100.0), Rope(theta=100.0, positions="rolling")])
def test_alibi_uses_original_distances_after_eviction(rope: Rope | None) -> None:
    """Compared with the numpy reference, with most tokens between the kept ones evicted."""
    random = np.random.default_rng(6)
    n_heads, n_kv_heads, head_dim = 4, 2, 16
    slopes = np.exp2(-np.arange(1, n_heads + 1, dtype=np.float64))
    policy = Policy.h2o(5, 4)
    cache = KVCache(
        n_heads, n_kv_heads, head_dim, policy, rope=rope, kv_dtype="f32", alibi_slopes=slopes
    )
    rules = ReferenceCache(n_heads, n_kv_heads, policy, rope, slopes=slopes)
    for n in (6, 1, 1, 7, 1, 1, 1, 12, 1):
        q = random.normal(size=(n, n_heads, head_dim)).astype(np.float32)
        k, v = random.normal(size=(2, n, n_kv_heads, head_dim)).astype(np.float32)
        out = cache.attend(q, k, v)
        expected = rules.attend(q.astype(float), k.astype(float), v.astype(float))
        np.testing.assert_allclose(out, expected, rtol=5e-5, atol=1e-6)
        for head, kept in enumerate(rules.heads):
            assert cache.positions(head).tolist() == [e.position for e in kept]
    assert rules.margin > 1e-5


@packages("torch", "transformers")
@pytest.mark.parametrize("n_batch", [1, 3, 40])
def test_bloom_logits_do_not_depend_on_n_batch(tmp_path: Path, n_batch: int) -> None:
    model = make_model(RECIPES["bloom_odd_heads"], 1)
    path = make_file(model, tmp_path)
    tokens = random_tokens(1)
    expected = reference_logits(model, tokens)
    with Generator(path, kv_dtype="f32", n_batch=n_batch) as generator:
        logits = generator.logits(tokens)
    tolerance = float32_tolerance(RECIPES["bloom_odd_heads"], expected)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)
