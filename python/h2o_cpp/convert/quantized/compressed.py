"""Checkpoints of compressed-tensors (llm-compressor)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from h2o_cpp.convert.checkpoint import SourceTensor, Values
from h2o_cpp.convert.quantized.fp4 import fp4, nvfp4
from h2o_cpp.convert.quantized.parts import (
    Tensors,
    bits_of,
    check_shape,
    floats,
    integers,
    put,
    refused,
    taken,
    unpacked,
    used,
)
from h2o_cpp.convert.quantized.scaled import scaled


def compressed(tensors: Tensors, quantization: Mapping[str, Any]) -> Tensors:
    form = quantization.get("format")
    if form in ("float-quantized", "naive-quantized", "int-quantized"):
        if any(name.endswith(".weight_zero_point") for name in tensors):
            raise refused(f"compressed-tensors ({form}) with zero points")
        return scaled(tensors, {})
    if form == "nvfp4-pack-quantized":
        return nvfp4(tensors, quantization)
    if form == "mxfp4-pack-quantized":
        return fp4(tensors, "mxfp4", ".weight_packed", ".weight_scale")
    groups = quantization.get("config_groups")
    kinds = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    if form != "pack-quantized" or len(kinds) != 1 or not isinstance(kinds[0], dict):
        raise refused(f"compressed-tensors ({form})")
    bits = bits_of(kinds[0], "compressed-tensors", "num_bits")
    tensors = used(tensors)
    parts = (".weight_packed", ".weight_scale", ".weight_shape")
    for name, [packed, scale, shape] in taken(tensors, *parts):
        zeros = tensors.pop(f"{name}.weight_zero_point", None)
        groups_of = tensors.pop(f"{name}.weight_g_idx", None)
        rows, columns = (int(n) for n in integers(shape))
        check_shape(name, packed, (rows, -(-columns * bits // 32)))
        if zeros is not None:
            check_shape(name, zeros, (-(-rows * bits // 32), scale.shape[1]))

        def read(
            packed: SourceTensor = packed,
            scale: SourceTensor = scale,
            zeros: SourceTensor | None = zeros,
            groups_of: SourceTensor | None = groups_of,
            rows: int = rows,
            columns: int = columns,
        ) -> Values:
            factors = floats(scale)
            of = np.arange(columns) // -(-columns // factors.shape[1])
            if groups_of is not None and (given := integers(groups_of)).min() >= 0:
                of = given
            q = unpacked(integers(packed), bits)[:, :columns]
            if zeros is None:
                zero: Any = 1 << bits - 1
            else:
                each = unpacked(np.ascontiguousarray(integers(zeros).T), bits)
                zero = each[:, :rows].T[:, of]
            values: Values = factors[:, of] * (q - zero)
            return values

        put(tensors, name, (rows, columns), read)
    return tensors
