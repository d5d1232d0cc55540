"""How far logits move when weights are rounded, beside transformers' logits of the same model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from h2o_cpp import Generator
from support.converted_files import make_file
from support.random_models import (
    Recipe,
    make_model,
    product_bits,
    products_error,
    random_tokens,
    reference_logits,
)


def check_rounded_weights(folder: Path, recipe: Recipe, outtype: str, *, seed: int) -> None:
    """Logits differ from the original's, and by no more than rounding to `outtype` explains.

    Reading a type incorrectly would give unrelated logits.
    """
    model = make_model(recipe, seed)
    path = make_file(model, folder, outtype)
    tokens = random_tokens(seed)
    expected = reference_logits(model, tokens)
    with Generator(path, kv_dtype="f32") as generator:
        error = np.abs(generator.logits(tokens) - expected).max()
        bits = product_bits(generator.stats().backend, outtype)
    assert 0 < error < products_error(recipe, bits) * np.abs(expected).max()
