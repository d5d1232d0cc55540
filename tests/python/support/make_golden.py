"""Writes tests/data/golden: small random models and their logits from Hugging Face transformers.

    python tests/python/support/make_golden.py

Needs the extra `reference`. The files are committed, so that tests do not need it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from h2o_cpp.convert import convert
from support.random_models import (
    RECIPES,
    make_model,
    random_tokens,
    reference_logits,
    save_checkpoint,
)
from test_logits import GOLDEN


def main() -> int:
    """Write models and logits."""
    golden = Path(__file__).resolve().parents[2] / "data" / "golden"
    golden.mkdir(exist_ok=True)
    for seed, name in enumerate(GOLDEN):
        model = make_model(RECIPES[name], seed)
        with tempfile.TemporaryDirectory() as checkpoint:
            save_checkpoint(model, Path(checkpoint))
            convert(Path(checkpoint), golden / f"{name}.gguf", "f32")
        tokens = random_tokens(seed)
        np.savez_compressed(
            golden / f"{name}.npz", tokens=tokens, logits=reference_logits(model, tokens)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
