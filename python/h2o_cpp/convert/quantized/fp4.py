"""Numbers of 4 bits (E2M1) with a scale for a few of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from h2o_cpp.convert.checkpoint import E4M3, SourceTensor, Values
from h2o_cpp.convert.quantized.parts import (
    Tensors,
    check_shape,
    floats,
    integers,
    put,
    taken,
    unpacked,
    used,
)

_E2M1 = np.array([s * x for s in (1, -1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)
_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))


class _Scales(NamedTuple):
    """One scale for each group of numbers: a float, or an index into a table. All of them are
    multiplied by a factor or divided by a divisor.
    """

    each: SourceTensor
    group: int
    table: Values
    factor: SourceTensor | None = None
    divisor: SourceTensor | None = None

    def read(self) -> Values:
        scales = floats(self.each) if self.each.read else self.table[integers(self.each)]
        if self.factor is not None:
            scales = scales * floats(self.factor).item()
        if self.divisor is not None:
            scales = scales / floats(self.divisor).item()
        return scales.repeat(self.group, -1)


def nvfp4(tensors: Tensors, quantization: Mapping[str, Any]) -> Tensors:
    """Scales for 16 and one for the tensor: ModelOpt multiplies by it, compressed-tensors divides
    by it.
    """
    del quantization
    tensors = used(tensors)
    parts = (".weight", ".weight_scale", ".weight_scale_2")
    for name, [packed, scales, factor] in taken(tensors, *parts):
        _put_fp4(tensors, name, packed, _Scales(scales, 16, E4M3, factor))
    parts = (".weight_packed", ".weight_scale", ".weight_global_scale")
    for name, [packed, scales, divisor] in taken(tensors, *parts):
        _put_fp4(tensors, name, packed, _Scales(scales, 16, E4M3, divisor=divisor))
    return tensors


def fp4(tensors: Tensors, mode: str, *parts: str) -> Tensors:
    """Scales for 32, powers of two (mxfp4), or for 16, of E4M3 (nvfp4)."""
    group, table = (32, _E8M0) if mode == "mxfp4" else (16, E4M3)
    tensors = used(tensors)
    for name, [packed, scales] in taken(tensors, *parts):
        _put_fp4(tensors, name, packed, _Scales(scales, group, table))
    return tensors


def _put_fp4(tensors: Tensors, name: str, packed: SourceTensor, scales: _Scales) -> None:
    """Put a weight of two numbers to a byte, or eight to a word."""
    rows, n_scales = packed.shape[:-1], scales.each.shape[-1]
    columns = n_scales * scales.group
    if packed.shape[-1] * 2 != columns:
        check_shape(name, packed, (*rows, columns // 8))
    check_shape(name, scales.each, (*rows, n_scales))

    def read() -> Values:
        values: Values = _E2M1[unpacked(integers(packed), 4)] * scales.read()
        return values

    put(tensors, name, (*rows, columns), read)
