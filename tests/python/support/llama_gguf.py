"""Small GGUF files of architecture `llama` with chosen tensors, as quantiser input."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize
from numpy.typing import NDArray

from h2o_cpp import _core

Array = NDArray[Any]
Shapes = dict[str, tuple[int, ...]]


def llama_shapes(
    n_layers: int,
    n_embd: int = 256,
    n_ff: int = 512,
    *,
    tied: bool = False,
    n_experts: int = 0,
    fused_qkv: bool = False,
) -> Shapes:
    """The shapes of a model's tensors, in numpy order.

    Rows have their real length; matrices have only 16 rows, which quantisers accept.
    """
    wide, narrow = (16, n_ff), (16, n_embd)
    shapes: Shapes = {"token_embd.weight": narrow, "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = narrow
    layer: Shapes = {"attn_norm.weight": (n_embd,), "ffn_norm.weight": (n_embd,)}
    if fused_qkv:
        layer |= {"attn_qkv.weight": narrow, "attn_qkv.bias": (16,)}
    else:
        layer |= dict.fromkeys(("attn_q.weight", "attn_k.weight", "attn_v.weight"), narrow)
    layer["attn_output.weight"] = narrow
    if n_experts:
        layer |= {
            "ffn_gate_inp.weight": (n_experts, n_embd),
            "ffn_up_exps.weight": (n_experts, *narrow),
            "ffn_down_exps.weight": (n_experts, *wide),
        }
    else:
        layer |= {"ffn_up.weight": narrow, "ffn_down.weight": wide}
    for i in range(n_layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Array]:
    """Values from Student's t distribution with 4 degrees of freedom, which has outliers."""
    rng = np.random.default_rng(seed)
    return {
        name: (0.02 * rng.standard_t(4, shape)).astype(np.float32) for name, shape in shapes.items()
    }


def llama_metadata(
    n_layers: int, n_embd: int = 256, n_ff: int = 512, **more: Any
) -> dict[str, Any]:
    """The metadata that llama.cpp needs to quantise."""
    return {
        "block_count": n_layers,
        "context_length": 128,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 64,
    } | more


def write_gguf(
    path: Path,
    tensors: Mapping[str, Array],
    metadata: Mapping[str, Any],
    architecture: str = "llama",
) -> None:
    """Write a GGUF file; metadata keys come without the architecture prefix."""
    with closing(GGUFWriter(path, architecture)) as writer:
        for key, value in metadata.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add[type(value)](f"{architecture}.{key}", value)
        for name, values in tensors.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def write_llama(path: Path, n_layers: int = 2, **sizes: Any) -> dict[str, Array]:
    tensors = random_tensors(llama_shapes(n_layers, **sizes))
    sizes = {key: value for key, value in sizes.items() if key in ("n_embd", "n_ff")}
    write_gguf(path, tensors, llama_metadata(n_layers, **sizes))
    return tensors


def decoded(dtype: str, values: Array) -> Array:
    blocks = _core.quantize(dtype, values, threads=2)
    values = dequantize(blocks, GGMLQuantizationType[dtype])
    return values


def types(path: Path) -> dict[str, str]:
    return {name: dtype for name, dtype, _, _ in _core.GgufFile(path).tensors()}
