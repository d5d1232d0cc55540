"""Indices of 4 bits into a table, by bitsandbytes."""

import json
from collections.abc import Mapping
from math import prod
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
    unpacked,
)


def bitsandbytes_4bit(tensors: Tensors, quantization: Mapping[str, Any]) -> Tensors:
    """Two indices to a byte, the high bits first, into a table (NF4 or FP4), times the largest
    number of a block, which may be an index too.
    """
    del quantization
    for mark in ("nf4", "fp4"):
        parts = ("", ".absmax", ".quant_map", f".quant_state.bitsandbytes__{mark}")
        for name, [weight, largest, table, state] in taken(
            tensors, *(f".weight{part}" for part in parts)
        ):
            nested = [
                tensors.pop(f"{name}.weight.{part}", None)
                for part in ("nested_absmax", "nested_quant_map")
            ]
            try:
                about = json.loads(integers(state).tobytes())
                shape, size = tuple(map(int, about["shape"])), int(about["blocksize"])
                of_nested = int(about.get("nested_blocksize", 0)), about.get("nested_offset", 0)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"tensor {name}.weight: damaged quant_state ({error})") from error
            check_shape(name, weight, (-(-prod(shape) // 2), 1))

            def read(
                weight: SourceTensor = weight,
                largest: SourceTensor = largest,
                table: SourceTensor = table,
                nested: list[SourceTensor | None] = nested,
                of_nested: tuple[int, float] = of_nested,
                shape: tuple[int, ...] = shape,
                size: int = size,
            ) -> Values:
                scales, codes = nested
                if scales is None or codes is None:
                    factors = floats(largest)
                else:
                    each = floats(scales).repeat(of_nested[0])[: largest.shape[0]]
                    factors = floats(codes)[integers(largest)] * each
                    factors = factors + np.float32(of_nested[1])
                q = unpacked(integers(weight), 4).reshape(-1, 2)[:, ::-1].reshape(-1)
                values: Values = floats(table)[q] * factors.repeat(size)[: q.size]
                return values[: prod(shape)].reshape(shape)

            put(tensors, name, shape, read)
    return tensors
