"""What a model must read and compute: what speed is to be compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from h2o_cpp import _core
from h2o_cpp.model.arguments import kv_dtypes

_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_TABLES = (_EMBEDDING, "position_embd.weight")  # of which a token needs one row


class Weight(NamedTuple):
    """A tensor of a model file; shape in numpy's order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def weights(files: Iterable[_core.GgufFile]) -> list[Weight]:
    """Of a model, all its files together."""
    return [Weight(*tensor) for file in files for tensor in file.tensors()]


def experts_used(file: _core.GgufFile) -> float:
    """The share of the experts that a token is sent to; 1 for a model without."""
    metadata = file.metadata()
    architecture = metadata["general.architecture"]
    n_experts = int(metadata.get(f"{architecture}.expert_count", 0))
    return int(metadata[f"{architecture}.expert_used_count"]) / n_experts if n_experts else 1.0


def decode_weight_bytes(tensors: Sequence[Weight], used: float = 1.0) -> int:
    """Bytes of weights that are read for each token that is decoded; used: as experts_used().

    All of them but the tables of which a row is looked up: the embedding, unless it is also the
    output matrix (there is no other), and learned positions.
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
    """Floating-point operations of the matrix products for each token of a prompt; used: as
    experts_used().

    Two for each weight of the layers. The output matrix is left out, because only the last token
    of a chunk needs it; so is attention, a few per cent in a prompt of 512 tokens.
    """
    layers = [t for t in tensors if t.name.startswith("blk.") and len(t.shape) >= 2]
    return round(sum(2 * prod(t.shape) * _share(t, used) for t in layers))


def _share(tensor: Weight, used: float) -> float:
    """Of a tensor, what a token needs: all of it but for the matrices of experts, which are one."""
    return used if len(tensor.shape) == 3 else 1.0


def kv_bytes(n_kv_heads: int, head_dim: int, kv_dtype: str | tuple[str, str]) -> float:
    """Bytes of K and V that one layer keeps of a token."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # not for all who import h2o_cpp: slow

    n_bytes = 0.0
    types = kv_dtypes(kv_dtype)
    for name in (types["k_dtype"], types["v_dtype"]):
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
        n_bytes += n_kv_heads * head_dim / block_size * block_bytes
    return n_bytes
