"""Weights of 8 bits with one scale for a tensor, a row, or a block of rows and columns."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from h2o_cpp.convert.checkpoint import SourceTensor, Values
from h2o_cpp.convert.quantized.parts import (
    Tensors,
    check_shape,
    floats,
    integers,
    put,
    taken,
    used,
)

_SCALES = (".weight_scale_inv", ".weight_scale")


def scaled(tensors: Tensors, quantization: Mapping[str, Any]) -> Tensors:
    block = quantization.get("weight_block_size")
    tensors = used(tensors)
    for suffix in _SCALES:
        for name, [weight, scale] in taken(tensors, ".weight", suffix):
            put(tensors, name, weight.shape, _times(name, weight, scale, block))
    # Experts in one tensor: experts.gate_up_proj, experts.gate_up_proj_scale_inv.
    for suffix in ("_scale_inv", "_scale"):
        for name in [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]:
            if (weight_of := tensors.get(name)) is not None:
                read = _times(name, weight_of, tensors.pop(f"{name}{suffix}"), block)
                tensors[name] = SourceTensor(weight_of.shape, read)
    return tensors


def _times(
    name: str, weight: SourceTensor, scale: SourceTensor, block: object
) -> Callable[[], Values]:
    """weight * scale, each of whose last dimensions is that of the weight, of its blocks, or 1."""
    shape = scale.shape if scale.shape != (weight.shape[0],) else (*scale.shape, 1)
    steps = [1] * len(weight.shape)
    if len(shape) > 1 or (shape and shape != (1,)):
        sizes = block if isinstance(block, list) else [None, None]
        for axis in range(1, len(shape) + 1):
            n, n_scales = weight.shape[-axis], shape[-axis]
            size = sizes[-axis] if axis <= 2 and n_scales > 1 else None
            steps[-axis] = size if isinstance(size, int) and size > 0 else -(-n // n_scales)
            if -(-n // steps[-axis]) != n_scales:
                raise ValueError(
                    f"tensor {name} has scales of shape {list(scale.shape)}, which do not divide"
                    f" weights of shape {list(weight.shape)}"
                )

    def read() -> Values:
        values = floats(weight) if weight.read else integers(weight).astype(np.float32)
        factors = floats(scale).reshape(shape)
        for axis in range(1, len(shape) + 1):
            step, n = steps[-axis], weight.shape[-axis]
            if shape[-axis] > 1 and step > 1:
                factors = np.repeat(factors, step, axis=-axis).take(range(n), axis=-axis)
        return values * factors

    return read


def bitsandbytes(tensors: Tensors, quantization: Mapping[str, Any]) -> Tensors:
    del quantization
    tensors = {name: t for name, t in tensors.items() if not name.endswith(".weight_format")}
    for name, [weight, largest] in taken(tensors, ".weight", ".SCB"):
        check_shape(name, largest, (weight.shape[0],))

        def read(weight: SourceTensor = weight, largest: SourceTensor = largest) -> Values:
            values: Values = integers(weight) * (floats(largest)[:, None] / np.float32(127))
            return values

        put(tensors, name, weight.shape, read)
    return tensors
