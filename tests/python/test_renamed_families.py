"""Families whose files are those of another family with other names; not all are in transformers.

llama.cpp's converter permutes the rows of InternLM 2 and MiniCPM as those of Llama and Granite.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from h2o_cpp import Generator
from h2o_cpp.convert import convert
from support.changed_gguf import changed
from support.needs import packages
from support.random_models import RECIPES, make_model, random_tokens, save_checkpoint


@packages("torch", "transformers")
@pytest.mark.parametrize(
    ("architecture", "recipe"),
    [
        ("internlm2", "llama_gqa8_biases"),
        ("internlm2", "llama_linear"),
        ("exaone", "qwen2"),
        ("minicpm", "granite"),
    ],
)
def test_renamed_files_have_the_same_logits(tmp_path: Path, architecture: str, recipe: str) -> None:
    save_checkpoint(make_model(RECIPES[recipe], 0), tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    path = changed(tmp_path / "model.gguf", tmp_path / "renamed.gguf", {}, {}, architecture)
    tokens = random_tokens(0)
    with Generator(tmp_path / "model.gguf") as one, Generator(path) as other:
        np.testing.assert_array_equal(one.logits(tokens), other.logits(tokens))


@packages("torch", "transformers")
def test_minicpm_without_its_scales_is_refused(tmp_path: Path) -> None:
    """As written by llama.cpp before the keys existed."""
    save_checkpoint(make_model(RECIPES["llama"], 0), tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    path = changed(tmp_path / "model.gguf", tmp_path / "renamed.gguf", {}, {}, "minicpm")
    with pytest.raises(ValueError, match=r"minicpm\.logit_scale"):
        Generator(path)
