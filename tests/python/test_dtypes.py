"""Every element type on every instruction set, compared with gguf-py's decoders."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from h2o_cpp import _core

# Bits of an element, and of its exponent.
PLAIN = {"F32": (32, 8), "F16": (16, 5), "BF16": (16, 8)}

# Offsets of the f16 numbers of a block: its scale and, in some types, the scale of its minimum.
BLOCKS = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "MXFP4": [],
    "IQ1_S": [0],
    "IQ1_M": [],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ3_XXS": [0],
    "IQ3_S": [0],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "NVFP4": [],
    "Q1_0": [0],
    "Q2_0": [0],
}

# Multiplied in float like F32, so with the roundings of the instruction set.
IN_FLOAT = ("Q1_0", "Q2_0")

# The largest factor of the minimum's scale.
MINS = {"Q4_1": 1, "Q5_1": 1, "Q2_K": 15, "Q4_K": 63, "Q5_K": 63}

each_dtype = pytest.mark.parametrize("dtype", [*PLAIN, *BLOCKS])
each_isa = pytest.mark.parametrize("isa", _core.isas())


def block(dtype: str) -> tuple[int, int]:
    """Elements and bytes of a block."""
    if dtype == "Q2_0":  # not known to gguf 0.19
        return 64, 18
    n, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    return int(n), int(n_bytes)


def decode(dtype: str, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    if dtype in ("Q1_0", "Q2_0"):  # by ggml's definition, as gguf has no decoders
        blocks = data.reshape(-1, 18)
        d = blocks[:, :2].copy().view("<f2").astype(np.float32)
        bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32)
        elements = 2 * bits - 1 if dtype == "Q1_0" else bits[:, ::2] + 2 * bits[:, 1::2] - 1
        decoded: NDArray[np.float32] = (d * elements).ravel()
        return decoded
    values = gguf.dequantize(data, gguf.GGMLQuantizationType[dtype])
    return np.asarray(values, dtype=np.float32).ravel()


def numbers(
    random: np.random.Generator, n: int, bits: int, exponent_bits: int, *, moderate: bool
) -> NDArray[np.uint8]:
    """Random finite numbers, or moderate ones in [2^-5, 2), whose products stay normal."""
    fraction_bits = bits - exponent_bits - 1
    one = (1 << (exponent_bits - 1)) - 1  # the exponent field of 1.0; 0 means subnormal
    least, end = (one - 5, one + 1) if moderate else (0, 2 * one + 1)
    sign = random.integers(2, size=n) << (bits - 1)
    exponent = random.integers(least, end, size=n) << fraction_bits
    fraction = random.integers(1 << fraction_bits, size=n)
    return (sign | exponent | fraction).astype(f"<u{bits // 8}").view(np.uint8)


def random_blocks(
    random: np.random.Generator, dtype: str, n: int, *, moderate: bool
) -> NDArray[np.uint8]:
    """n blocks of random bits, with numbers() as their scales."""
    if dtype in PLAIN:
        return numbers(random, n, *PLAIN[dtype], moderate=moderate)
    data = random.integers(256, size=(n, block(dtype)[1]), dtype=np.uint8)
    for offset in BLOCKS[dtype]:
        data[:, offset : offset + 2] = numbers(random, n, 16, 5, moderate=moderate).reshape(n, 2)
    if dtype == "MXFP4":  # powers of two; the largest would overflow
        data[:, 0] = random.integers(*((120, 129) if moderate else (0, 252)), size=n)
    if dtype == "NVFP4" and moderate:
        data[:, :4] = random.integers(0x18, 0x50, size=(n, 4))
    if dtype == "IQ1_M":  # its scale is in the high bits of four words
        scales = numbers(random, n, 16, 5, moderate=moderate).view("<u2")
        words = data[:, 48:].copy().view("<u2") & 0xFFF
        words |= (scales[:, None] >> [0, 4, 8, 12] & 15).astype("<u2") << 12
        data[:, 48:] = words.view(np.uint8)
    return data.ravel()


def assert_same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def test_all_types_are_tested() -> None:
    assert sorted(_core.dtypes()) == sorted([*PLAIN, *BLOCKS])


@each_isa
@each_dtype
def test_decoding_equals_gguf_py(dtype: str, isa: str) -> None:
    # Bit for bit, including signed zeros: all products are exact, so the order does not matter.
    random = np.random.default_rng(1)
    for n_blocks in (1, 2, 1000):
        data = random_blocks(random, dtype, n_blocks, moderate=False)
        assert_same_bits(_core.dequantize(dtype, data, isa), decode(dtype, data))


def largest_min(dtype: str, data: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The largest minimum that each block may add to its elements."""
    if dtype not in MINS:
        return np.zeros(data.size // block(dtype)[1])
    least = data.reshape(-1, block(dtype)[1])[:, BLOCKS[dtype][1] :][:, :2]
    largest: NDArray[np.float64] = np.abs(least.copy().view("<f2")[:, 0].astype(np.float64))
    return largest * MINS[dtype]


BF16_PRODUCTS = ("x86_64_v4_bf16", "x86_64_v4_amx")
ROUNDED = {"F32": 0, "F16": 2, "BF16": 1}  # number of factors that these round to bf16


@each_isa
@each_dtype
def test_matmul_error_is_within_bound(dtype: str, isa: str) -> None:
    random = np.random.default_rng(2)
    for n_out, n_blocks, n in ((1, 1, 1), (8, 2, 1), (21, 3, 6), (10, 37, 9)):
        size = block(dtype)[0]
        n_in = n_blocks * size
        data = random_blocks(random, dtype, n_out * n_blocks, moderate=True)
        w = decode(dtype, data).reshape(n_out, n_in).astype(np.float64)
        x = random.uniform(-2, 2, size=(n, n_in)).astype(np.float32)
        y = _core.matmul(dtype, data, n_out, n_in, x, isa)
        assert y.shape == (n, n_out)
        if dtype in PLAIN:
            # Each product is rounded once (no fma), then in at most n_in sums of its lane and in 4
            # sums of 16 lanes: gamma of n_in + 5 roundings to f32.
            roundings = (n_in + 5) * 2.0**-24
            # bf16 products round x to 8 significant bits, and w too if it is F16.
            factor = (1 + 2.0**-8) ** ROUNDED[dtype] if isa in BF16_PRODUCTS else 1.0
            magnitude = np.abs(x) @ np.abs(w).T
            off = (factor - 1) * magnitude
            magnitude *= factor
        else:
            # x is rounded to multiples of 1/127 of the largest of 32 values: an error of half a
            # step, and slightly more for three f32 roundings of up to 127 steps. The sum of a group
            # of 16 or more is exact, then scaled by a product (2 roundings); with the group's
            # minimum, which is added separately, there are n_in / 8 sums.
            step = np.abs(x).reshape(n, -1, 32).max(axis=2, keepdims=True) / 127
            half = np.broadcast_to(step * (0.5 + 2.0**-14), (n, n_in // 32, 32)).reshape(n, n_in)
            roundings = (n_in / 8 + 2) * 2.0**-24
            off = half @ np.abs(w).T
            least = np.repeat(largest_min(dtype, data), size).reshape(n_out, n_in)
            magnitude = (np.abs(x) + half) @ (np.abs(w) + 2 * least).T
        bound = off + roundings / (1 - roundings) * magnitude
        assert np.all(np.abs(y - x @ w.T) <= bound)


@each_isa
@pytest.mark.parametrize("dtype", [dtype for dtype in BLOCKS if dtype not in IN_FLOAT])
def test_quantized_matmul_is_identical_on_every_instruction_set(dtype: str, isa: str) -> None:
    random = np.random.default_rng(4)
    n_blocks, n_out, n = 5, 37, 11
    n_in = n_blocks * block(dtype)[0]
    data = random_blocks(random, dtype, n_out * n_blocks, moderate=True)
    x = random.normal(size=(n, n_in)).astype(np.float32)
    y = _core.matmul(dtype, data, n_out, n_in, x, isa)
    assert_same_bits(y, _core.matmul(dtype, data, n_out, n_in, x, "scalar"))


@each_isa
@each_dtype
def test_matmul_rows_are_independent_of_batch(dtype: str, isa: str) -> None:
    random = np.random.default_rng(3)
    n_blocks, n_out, n = 2, 11, 9
    n_in = n_blocks * block(dtype)[0]
    data = random_blocks(random, dtype, n_out * n_blocks, moderate=True)
    x = random.normal(size=(n, n_in)).astype(np.float32)
    y = _core.matmul(dtype, data, n_out, n_in, x, isa)
    for rows in (slice(0, 1), slice(3, 8), slice(5, 9)):
        assert_same_bits(_core.matmul(dtype, data, n_out, n_in, x[rows], isa), y[rows])
    for o, row in enumerate(np.split(data, n_out)):
        one = _core.matmul(dtype, row, 1, n_in, x, isa)
        assert_same_bits(one[:, 0].copy(), y[:, o].copy())


def test_empty_inputs_give_empty_outputs() -> None:
    empty = np.zeros(0, np.uint8)
    assert _core.dequantize("Q4_K", empty).shape == (0,)
    no_rows = np.zeros((0, 32), np.float32)
    assert _core.matmul("Q4_0", np.zeros(18, np.uint8), 1, 32, no_rows).shape == (0, 1)


def test_unaligned_data() -> None:
    data = random_blocks(np.random.default_rng(4), "Q6_K", 3, moderate=False)
    odd = np.concatenate([np.zeros(1, np.uint8), data])[1:]
    assert_same_bits(_core.dequantize("Q6_K", odd), decode("Q6_K", data))


def test_partial_blocks_and_wrong_shapes_are_rejected() -> None:
    x = np.zeros((1, 32), np.float32)
    w = np.zeros(36, np.uint8)
    with pytest.raises(ValueError, match="35 bytes in 1 dimensions, expected one of blocks of 18"):
        _core.dequantize("Q4_0", w[:35])
    with pytest.raises(ValueError, match="36 bytes in 2 dimensions"):
        _core.dequantize("Q4_0", w.reshape(2, 18))
    with pytest.raises(ValueError, match=r"w is \[2, 33\], expected rows of .* blocks of 32"):
        _core.matmul("Q4_0", w, 2, 33, x)
    for n_out, n_in in ((0, 32), (-2, 32), (2, 0), (2, -32)):
        with pytest.raises(ValueError, match=r"w is \["):
            _core.matmul("Q4_0", w, n_out, n_in, x)
    for n_out in (1, 3, 2**31 - 1):
        with pytest.raises(ValueError, match=f"expected one of {n_out} rows of 18"):
            _core.matmul("Q4_0", w, n_out, 32, x)
    with pytest.raises(ValueError, match="36 bytes in 2 dimensions"):
        _core.matmul("Q4_0", w.reshape(2, 18), 2, 32, x)
    for wrong in (x[:, :31], x[0]):
        with pytest.raises(ValueError, match=r"expected \[n, 32\]"):
            _core.matmul("Q4_0", w, 2, 32, wrong)


@pytest.mark.parametrize("name", ["", "q4_0", "Q8_1", "Q3_0"])
def test_unknown_types_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="is not one of F32, F16, BF16, Q4_0"):
        _core.dequantize(name, np.zeros(36, np.uint8))
    with pytest.raises(ValueError, match="is not one of F32, F16, BF16, Q4_0"):
        _core.matmul(name, np.zeros(36, np.uint8), 1, 32, np.zeros((1, 32), np.float32))


def test_unknown_instruction_set_is_rejected() -> None:
    with pytest.raises(ValueError, match="instruction set 'mmx'"):
        _core.dequantize("Q4_0", np.zeros(18, np.uint8), "mmx")
