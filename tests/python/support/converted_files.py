"""GGUF files of transformers' models, and their logits and evictions beside a reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from h2o_cpp import Generator, Policy
from h2o_cpp.convert import convert
from support.h2o_rules import ReferenceCache
from support.random_models import Recipe, float32_tolerance, random_tokens, save_checkpoint


def make_file(model: Any, folder: Path, outtype: str = "f32") -> Path:
    """The path of the converted model; its checkpoint is beside it."""
    save_checkpoint(model, folder)
    convert(folder, folder / "model.gguf", outtype)
    return folder / "model.gguf"


class Evicting(Protocol):
    """A model with a ReferenceCache for each layer."""

    caches: list[ReferenceCache]

    def read(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The logits after each token of a chunk."""
        ...


def check_evicts(
    reference: Evicting,
    path: Path,
    recipe: Recipe,
    policy: Policy,
    n_batch: int,
    *,
    seed: int,
    device: str = "auto",
) -> None:
    """Logits and kept tokens are the reference's, which reads the same chunks of n_batch tokens."""
    tokens = random_tokens(seed)
    parts = [tokens[i : i + n_batch] for i in range(0, len(tokens), n_batch)]
    expected = np.concatenate([reference.read(part) for part in parts])
    assert all(cache.margin > 1e-5 for cache in reference.caches)
    with Generator(
        path, policy=policy, kv_dtype="f32", n_batch=n_batch, threads=2, device=device
    ) as generator:
        logits = generator.logits(tokens)
        for layer, cache in enumerate(reference.caches):
            for head, kept in enumerate(cache.heads):
                assert generator.kept(layer, head)[0].tolist() == [e.position for e in kept]
    tolerance = float32_tolerance(recipe, expected)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)
