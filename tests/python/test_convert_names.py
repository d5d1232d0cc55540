"""Tensor names and keys of converted files are those of llama.cpp's package `gguf`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import pytest

from h2o_cpp.convert.conversion import family_of
from support.converted_files import make_file
from support.needs import packages
from support.opt_checkpoint import read_metadata, read_tensors
from support.random_models import RECIPES, make_model

ARCHITECTURES = {name: id for id, name in gguf.MODEL_ARCH_NAMES.items()}
# One recipe per family; `opt` is not an architecture of llama.cpp.
NAMES = {recipe.model: name for name, recipe in RECIPES.items() if recipe.model != "OPT"}.values()


def known_keys(architecture: str) -> set[str]:
    """All keys of `gguf`, with the architecture filled in."""
    groups = [group for group in vars(gguf.Keys).values() if isinstance(group, type)]
    values = [value for group in groups for value in vars(group).values()]
    return {value.replace("{arch}", architecture) for value in values if isinstance(value, str)}


@packages("torch", "transformers")
@pytest.mark.parametrize("name", NAMES)
def test_tensor_names_and_keys(tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    path = make_file(make_model(recipe, 0), tmp_path)
    metadata = read_metadata(path)
    architecture = metadata["general.architecture"]
    id = ARCHITECTURES[architecture]

    known_names = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[id]}
    for tensor in read_tensors(path):
        stem = re.sub(r"\.(weight|bias)$", "", re.sub(r"^blk\.\d+\.", "blk.{bid}.", tensor))
        assert stem in known_names

    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    family = family_of(config)
    mapping = gguf.get_tensor_name_map(id, recipe.n_layers)
    for spec in family.tensors({**family.absent, **config}):
        # llama.cpp's converter renames parts of a fused tensor in HF, Granite 4's MLP, LFM2's
        # experts, Nemotron's, and the halves of latent attention's kv_b_proj.
        renamed = (
            *("gate_up", "shared_mlp", "in_proj_qkvz", "feed_forward.expert", "mixer.expert"),
            "kv_b_proj",
        )
        if spec.rows is not None or any(name in spec.hf for name in renamed):
            continue
        # Expert tensors are merged under the name without a number.
        hf = family.base_prefix * (not spec.hf.startswith("lm_head")) + spec.hf.replace(".{}", "")
        hf = hf if hf != "embed_out.weight" and "embed_out" not in hf else spec.hf
        hf = hf.replace(".dt_bias", ".dt_proj_bias")  # renamed by llama.cpp's converter
        hf = hf.removesuffix("_bias") + ".bias" * hf.endswith("_bias")
        found = mapping.get_name(hf, try_suffixes=(".weight", ".bias"))
        if found is None:  # BLOOM's first checkpoints contain only the base model
            found = mapping.get_name(spec.hf, try_suffixes=(".weight", ".bias"))
        if not hf.endswith((".weight", ".bias", ".A_log", ".D")):  # a parameter, not a module
            found = f"{found}.weight"
        assert found == spec.gguf

    ours = {key for key in metadata if key.startswith(f"{architecture}.")}
    assert ours <= known_keys(architecture)
