"""Helpers to take the tensors of quantized weights apart."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from h2o_cpp.convert.checkpoint import Integers, SourceTensor, Values

Tensors = dict[str, SourceTensor]

_INSTEAD = "take the original checkpoint, or a GGUF file of it"

# Scales of activations and of the cache, which nothing here rounds.
_UNUSED = (
    *(".input_scale", ".activation_scale", ".input_activation_scale", ".input_global_scale"),
    *(".k_scale", ".v_scale"),
)


def refused(method: object) -> ValueError:
    return ValueError(
        f"config.json: quantization_config: the weights are quantized by {method}; {_INSTEAD}"
    )


def used(tensors: Tensors) -> Tensors:
    """All tensors but the scales that nothing here rounds by."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(_UNUSED)}


def taken(tensors: Tensors, *suffixes: str) -> Iterator[tuple[str, list[SourceTensor]]]:
    """Remove the tensors NAME + suffix that exist for all suffixes; yields NAME and them."""
    names = [name.removesuffix(suffixes[0]) for name in tensors if name.endswith(suffixes[0])]
    for name in names:
        if all(f"{name}{suffix}" in tensors for suffix in suffixes):
            yield name, [tensors.pop(f"{name}{suffix}") for suffix in suffixes]


def put(tensors: Tensors, name: str, shape: tuple[int, ...], read: Callable[[], Values]) -> None:
    tensors[f"{name}.weight"] = SourceTensor(shape, read)


def floats(tensor: SourceTensor) -> Values:
    if tensor.read is None:
        raise ValueError("a scale of quantized weights is not a float")
    return tensor.read()


def integers(tensor: SourceTensor) -> Integers:
    if tensor.read_integers is None:
        raise ValueError("quantized weights are not integers")
    return tensor.read_integers()


def check_shape(name: str, tensor: SourceTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"tensor {name} of quantized weights has shape {list(tensor.shape)},"
            f" expected {list(shape)}"
        )


def unpacked(words: Integers, bits: int) -> npt.NDArray[np.int32]:
    """The numbers of `bits` bits in the last dimension, the lowest bits first; those of 3, 5 and 6
    bits may be in two words.
    """
    words = np.ascontiguousarray(words)
    if bits in (3, 5, 6):
        each = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
        each = each[..., : each.shape[-1] // bits * bits]
        parts = each.reshape(*words.shape[:-1], -1, bits).astype(np.int32)
        sums: npt.NDArray[np.int32] = (parts << np.arange(bits)).sum(-1, dtype=np.int32)
        return sums
    shifts = np.arange(0, words.itemsize * 8, bits, dtype=np.uint32)
    words = words.view(f"u{words.itemsize}")
    numbers = (words[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.int32)
    return np.reshape(numbers, (*words.shape[:-1], -1))


def bits_of(quantization: Mapping[str, Any], method: str, key: str = "bits") -> int:
    bits = quantization.get(key)
    if bits not in (2, 3, 4, 8):
        raise refused(f"{method} in {bits!r} bits")
    return int(bits)
