"""Checkpoints of MLX."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from h2o_cpp.convert.checkpoint import SourceTensor, Values
from h2o_cpp.convert.quantized.fp4 import fp4
from h2o_cpp.convert.quantized.parts import (
    Tensors,
    check_shape,
    floats,
    integers,
    put,
    refused,
    taken,
    unpacked,
)


def mlx(tensors: Tensors, quantization: Mapping[str, Any]) -> Tensors:
    mode = quantization.get("mode", "affine")
    if mode in ("mxfp4", "nvfp4"):
        return fp4(tensors, mode, ".weight", ".scales")
    if mode != "affine":
        raise refused(f"MLX in {mode}")
    size = quantization["group_size"]
    for name, [weight, scales, biases] in taken(tensors, ".weight", ".scales", ".biases"):
        own = quantization.get(name)
        group = own.get("group_size", size) if isinstance(own, dict) else size
        columns = scales.shape[-1] * group
        bits, rest = divmod(weight.shape[-1] * 32, columns)
        if rest or bits not in (2, 3, 4, 5, 6, 8):
            raise refused(f"MLX in {weight.shape[-1] * 32 / columns:g} bits")
        check_shape(name, biases, scales.shape)

        def read(
            weight: SourceTensor = weight,
            scales: SourceTensor = scales,
            biases: SourceTensor = biases,
            bits: int = bits,
            group: int = group,
        ) -> Values:
            q = unpacked(integers(weight), bits)
            factors, least = (np.repeat(floats(t), group, axis=-1) for t in (scales, biases))
            values: Values = q * factors + least
            return values

        put(tensors, name, (*weight.shape[:-1], columns), read)
    return tensors
