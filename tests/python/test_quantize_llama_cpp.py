"""Quantized files compared with llama.cpp's: equal types and metadata, no larger errors."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from h2o_cpp.quantize import MIXES, quantize
from support.llama_gguf import llama_metadata, llama_shapes, random_tensors, write_gguf
from support.opt_checkpoint import read_metadata

llama_cpp = pytest.importorskip("llama_cpp", reason="quantizes the same files with llama.cpp")

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "two layers": ("llama", {"n_layers": 2}, {}),
    "17 layers": ("llama", {"n_layers": 17}, {}),
    "tied": ("llama", {"n_layers": 9, "tied": True}, {}),
    "rows of 288": ("llama", {"n_layers": 4, "n_embd": 288, "n_ff": 768}, {}),
    "rows of 80": ("llama", {"n_layers": 3, "n_embd": 80, "n_ff": 160}, {}),
    "8 experts": (
        "llama", {"n_layers": 4, "n_experts": 8}, {"expert_count": 8, "expert_used_count": 2},
    ),
    "4 experts": (
        "llama", {"n_layers": 9, "n_experts": 4}, {"expert_count": 4, "expert_used_count": 2},
    ),
    "70B": ("llama", {"n_layers": 80, "n_ff": 256}, {}),
    "Qwen2": ("qwen2", {"n_layers": 10}, {}),
    "GPT-NeoX": (
        "gptneox", {"n_layers": 11, "fused_qkv": True},
        {"attention.layer_norm_epsilon": 1e-5, "use_parallel_residual": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("model", MODELS)
def test_types_metadata_and_errors(tmp_path: Path, model: str, mix: str) -> None:
    architecture, sizes, metadata = MODELS[model]
    tensors = random_tensors(llama_shapes(**sizes))
    sizes = {key: value for key, value in sizes.items() if key in ("n_layers", "n_embd", "n_ff")}
    write_gguf(tmp_path / "in.gguf", tensors, llama_metadata(**sizes, **metadata), architecture)
    quantize(tmp_path / "in.gguf", tmp_path / "ours.gguf", mix)
    llama_quantize(tmp_path / "in.gguf", tmp_path / "theirs.gguf", mix)

    assert read_metadata(tmp_path / "ours.gguf") == read_metadata(tmp_path / "theirs.gguf")
    ours, theirs = (
        {tensor.name: tensor for tensor in GGUFReader(tmp_path / name).tensors}
        for name in ("ours.gguf", "theirs.gguf")
    )
    assert {name: tensor.tensor_type for name, tensor in ours.items()} == {
        name: tensor.tensor_type for name, tensor in theirs.items()
    }
    for name, values in tensors.items():
        if ours[name].tensor_type.name in K_QUANTS:
            mine, their = (
                np.sqrt(np.mean((dequantize(t.data, t.tensor_type) - values) ** 2))
                for t in (ours[name], theirs[name])
            )
            assert mine <= 1.02 * their, name
        else:
            np.testing.assert_array_equal(ours[name].data, theirs[name].data, err_msg=name)


def llama_quantize(source: Path, output: Path, mix: str) -> None:
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = MIXES[mix].file_type
    status = llama_cpp.llama_model_quantize(bytes(source), bytes(output), ctypes.byref(parameters))
    assert status == 0
