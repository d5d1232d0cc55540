"""Integers of a few bits, packed by GPTQ and AWQ."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from h2o_cpp.convert.checkpoint import SourceTensor, Values
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
)


def gptq(tensors: Tensors, quantization: Mapping[str, Any]) -> Tensors:
    bits = bits_of(quantization, "GPTQ")
    offset = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
    parts = (".qweight", ".qzeros", ".scales")
    for name, [weight, zeros, scales] in taken(tensors, *parts):
        groups = tensors.pop(f"{name}.g_idx", None)
        n_in, n_out = weight.shape[0] * 32 // bits, weight.shape[1]
        check_shape(name, scales, (scales.shape[0], n_out))
        check_shape(name, zeros, (scales.shape[0], n_out * bits // 32))

        def read(
            weight: SourceTensor = weight,
            zeros: SourceTensor = zeros,
            scales: SourceTensor = scales,
            groups: SourceTensor | None = groups,
            n_in: int = n_in,
        ) -> Values:
            q = unpacked(np.ascontiguousarray(integers(weight).T), bits)  # [out, in]
            # [groups, out]; a zero of 0 is stored as the largest number
            zero = unpacked(integers(zeros), bits) + offset & (1 << bits) - 1
            n_groups = scales.shape[0]
            of = np.arange(n_in) // -(-n_in // n_groups) if groups is None else integers(groups)
            factors: Values = floats(scales)[of].T * (q - zero[of].T)
            return factors

        put(tensors, name, (n_out, n_in), read)
    return tensors


_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where each eighth of a word is


def awq(tensors: Tensors, quantization: Mapping[str, Any]) -> Tensors:
    if quantization.get("bits", quantization.get("w_bit")) != 4:
        raise refused("AWQ in other than 4 bits")
    if str(quantization.get("version", "gemm")).lower() != "gemm":
        raise refused(f"AWQ of version {quantization.get('version')!r}")
    for name, [weight, zeros, scales] in taken(tensors, ".qweight", ".qzeros", ".scales"):
        n_in, n_out = weight.shape[0], weight.shape[1] * 8
        check_shape(name, scales, (scales.shape[0], n_out))
        check_shape(name, zeros, (scales.shape[0], weight.shape[1]))

        def read(
            weight: SourceTensor = weight,
            zeros: SourceTensor = zeros,
            scales: SourceTensor = scales,
            n_in: int = n_in,
        ) -> Values:
            q, zero = (_in_order(unpacked(integers(t), 4)) for t in (weight, zeros))
            of = np.arange(n_in) // -(-n_in // scales.shape[0])
            values: Values = ((q - zero[of]) * floats(scales)[of]).T
            return values

        put(tensors, name, (n_out, n_in), read)
    return tensors


def _in_order(numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    eights = numbers.reshape(*numbers.shape[:-1], -1, 8)[..., _AWQ_ORDER]
    return np.reshape(eights, numbers.shape)
