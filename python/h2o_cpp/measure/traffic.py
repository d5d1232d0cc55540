"""Bytes read and operations computed per token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from h2o_cpp import _core
from h2o_cpp.arguments import KvDType, kv_dtypes

_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_TABLES = (_EMBEDDING, "position_embd.weight")  # a token needs one row


class Weight(NamedTuple):
    """A tensor of a model file; shape in numpy's order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def layer(self) -> int:
        """The layer that it is in; -1 outside of layers."""
        found = re.match(r"blk\.(\d+)\.", self.name)
        return int(found[1]) if found else -1

    @property
    def has_experts(self) -> bool:
        """Whether it has a matrix per expert."""
        return len(self.shape) == 3


def weights(files: Iterable[_core.GgufFile]) -> list[Weight]:
    """The tensors of all files of a model, without the layers that predict further tokens."""
    first, *others = files
    metadata = first.metadata()
    architecture = metadata["general.architecture"]
    n_layers = int(metadata[f"{architecture}.block_count"])
    n_unused = int(metadata.get(f"{architecture}.nextn_predict_layers", 0))
    tensors = [Weight(*tensor) for file in (first, *others) for tensor in file.tensors()]
    return [tensor for tensor in tensors if tensor.layer < n_layers - n_unused]


def experts_used(file: _core.GgufFile) -> float:
    """The share of experts that a token uses; 1 without experts."""
    metadata = file.metadata()
    architecture = metadata["general.architecture"]
    n_experts = int(metadata.get(f"{architecture}.expert_count", 0))
    return int(metadata[f"{architecture}.expert_used_count"]) / n_experts if n_experts else 1.0


def decode_weight_bytes(tensors: Sequence[Weight], used: float = 1.0) -> int:
    """Bytes of weights read per decoded token; used: from experts_used().

    Excludes lookup tables: learned positions, and the embedding unless it is the output matrix.
    """
    tied = all(tensor.name != _OUTPUT for tensor in tensors)
    return round(
        sum(
            tensor.nbytes * _share(tensor, used)
            for tensor in tensors
            if tensor.name not in _TABLES or (tied and tensor.name == _EMBEDDING)
        )
    )


def prefill_flops(tensors: Sequence[Weight], used: float = 1.0) -> int:
    """Floating-point operations of matrix products per prompt token; used: from experts_used().

    Two per weight of the layers. Excludes the output matrix, which only the last token of a chunk
    needs, and attention, a few per cent of a prompt of 512 tokens.
    """
    layers = [t for t in tensors if t.layer >= 0 and len(t.shape) >= 2]
    return round(sum(2 * prod(t.shape) * _share(t, used) for t in layers))


def _share(tensor: Weight, used: float) -> float:
    """The share of a tensor that a token uses."""
    return used if tensor.has_experts else 1.0


def kv_bytes(n_kv_heads: int, head_dim: int, kv_dtype: KvDType) -> float:
    """Bytes of K and V per token and layer."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # slow to import

    n_bytes = 0.0
    types = kv_dtypes(kv_dtype)
    for name in (types["k_dtype"], types["v_dtype"]):
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
        n_bytes += n_kv_heads * head_dim / block_size * block_bytes
    return n_bytes
