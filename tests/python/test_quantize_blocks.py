"""Quantized blocks compared with gguf-py's, errors of K-quants, and rejected input."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from gguf.quants import quantize as gguf_quantize

from h2o_cpp import _core
from support.llama_gguf import (
    Array,
    decoded,
)

SIMPLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
FEW_BITS = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def with_extremes(values: Array, low: float, high: float) -> Array:
    """Values whose first two of each block are its extremes, so that its step is known."""
    values[:, ::32] = low
    values[:, 1::32] = high
    return values


def ties(low: float, high: float) -> Callable[[], Array]:
    """Every value is a level or halfway between two, with blocks from `low` to `high`."""
    return lambda: with_extremes(
        rng().integers(int(2 * low), int(2 * high) + 1, (64, 256)) / 2, low, high
    )


def with_infinite_reciprocal() -> Array:
    """Values so small that 1 / step overflows."""
    return 1e-40 * rng().standard_normal((64, 256))


INPUTS: dict[str, Callable[[], Array]] = {
    "normal": lambda: rng().standard_normal((64, 256)),
    "heavy tails": lambda: rng().standard_t(2, (64, 256)),
    "constant": lambda: np.full((4, 256), 3.7),
    "negative constant": lambda: np.full((4, 256), -0.3),
    "zero": lambda: np.zeros((2, 256)),
    "negative zero": lambda: -np.zeros((2, 256)),
    "zeros of both signs": lambda: with_extremes(
        rng().choice([0.0, -0.0, 1.0], (64, 256), p=[0.5, 0.4, 0.1]), -2.0, 3.0
    ),
    "equal magnitudes": lambda: rng().choice([-1.0, 1.0], (64, 256)),
    "f16 subnormal": lambda: 1e-6 * rng().standard_normal((64, 256)),
    "below f16": lambda: 1e-30 * rng().standard_normal((64, 256)),
    "huge": lambda: rng().uniform(-60000, 60000, (64, 256)),
    "ties of Q4_0": ties(-8, 7),
    "ties of Q4_1": ties(0, 15),
    "ties of Q5_0": ties(-16, 15),
    "ties of Q5_1": ties(0, 31),
    "ties of Q8_0": ties(-127, 127),
}


@pytest.mark.parametrize("dtype", SIMPLE)
@pytest.mark.parametrize("kind", INPUTS)
def test_simple_types_are_bit_identical_to_gguf_py(kind: str, dtype: str) -> None:
    values = INPUTS[kind]().astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = gguf_quantize(values, GGMLQuantizationType[dtype])
    np.testing.assert_array_equal(_core.quantize(dtype, values, threads=2), expected)


@pytest.mark.parametrize("dtype", SIMPLE)
def test_levels_are_zero_if_1_over_step_overflows(dtype: str) -> None:
    # gguf-py's levels depend on how the processor converts infinity.
    values = with_infinite_reciprocal().astype(np.float32)
    type = GGMLQuantizationType[dtype]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = gguf_quantize(values, type)
    shape = (-1, GGML_QUANT_SIZES[type][1])
    n_scales = 4 if dtype in ("Q4_1", "Q5_1") else 2  # bytes
    actual = _core.quantize(dtype, values, threads=2).reshape(shape)
    np.testing.assert_array_equal(actual[:, :n_scales], expected.reshape(shape)[:, :n_scales])
    assert not actual[:, n_scales:].any()


@pytest.mark.parametrize("dtype", ["Q4_1", "Q5_1"])
def test_minimum_of_both_zeros_has_either_sign(dtype: str) -> None:
    # Which zero is the minimum of +0 and -0 depends on numpy's vector instructions.
    values = rng().choice([0.0, -0.0, 1.0], (64, 256)).astype(np.float32)
    type = GGMLQuantizationType[dtype]
    np.testing.assert_array_equal(
        decoded(dtype, values), dequantize(gguf_quantize(values, type), type)
    )


@pytest.mark.parametrize("dtype", [*SIMPLE, *K_QUANTS, *FEW_BITS])
def test_blocks_do_not_depend_on_threads(dtype: str) -> None:
    values = rng().standard_normal((301, 512)).astype(np.float32)
    single = _core.quantize(dtype, values, threads=1)
    for threads in (2, 3, 8):
        np.testing.assert_array_equal(_core.quantize(dtype, values, threads=threads), single)
    np.testing.assert_array_equal(_core.quantize(dtype, values[100:], threads=2), single[100:])


def error(values: Array, decoded: Array) -> float:
    return float(np.sqrt(np.mean((values.astype(np.float64) - decoded) ** 2)))


IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


def round_to_nearest(dtype: str, values: Array) -> Array:
    """The simple method: scales and mins from the extremes, all rounded to nearest."""
    if dtype in ("Q3_K", "Q6_K"):
        highest, largest = (31, 127) if dtype == "Q6_K" else (3, 31)
        groups = values.reshape(-1, 16, 16)
        scales = np.abs(groups).max(-1, keepdims=True) / highest
        unit = scales.max(1, keepdims=True) / largest
        steps = unit * np.maximum(np.rint(scales / unit), 1)
        levels = np.clip(np.rint(groups / steps), -highest - 1, highest)
        return np.reshape(steps * levels, values.shape)
    if dtype in ("IQ4_NL", "IQ4_XS"):
        groups = values.reshape(-1, 8, 32)
        scales = np.abs(groups).max(-1, keepdims=True) / 113
        if dtype == "IQ4_XS":
            unit = scales.max(1, keepdims=True) / 31
            scales = unit * np.maximum(np.rint(scales / unit), 1)
        nearest = np.abs(groups[..., None] / scales[..., None] - IQ4_VALUES).argmin(-1)
        return np.reshape(scales * IQ4_VALUES[nearest], values.shape)
    highest, largest, n = {"Q2_K": (3, 15, 16), "Q4_K": (15, 63, 8), "Q5_K": (31, 63, 8)}[dtype]
    groups = values.reshape(-1, n, 256 // n)
    lows = np.minimum(groups.min(-1, keepdims=True), 0)
    scales = (groups.max(-1, keepdims=True) - lows) / highest
    unit, min_unit = scales.max(1, keepdims=True) / largest, -lows.min(1, keepdims=True) / largest
    steps = unit * np.maximum(np.rint(scales / unit), 1)
    mins = min_unit * np.rint(-lows / min_unit)
    levels = np.clip(np.rint((groups + mins) / steps), 0, highest)
    return np.reshape(steps * levels - mins, values.shape)


@pytest.mark.parametrize("dtype", [*K_QUANTS, *FEW_BITS])
@pytest.mark.parametrize("kind", ["normal", "heavy tails"])
def test_k_quants_have_less_error_than_round_to_nearest(kind: str, dtype: str) -> None:
    # Measured: 0.70 to 0.94 of its error.
    values = INPUTS[kind]().astype(np.float32)
    assert error(values, decoded(dtype, values)) < 0.96 * error(
        values, round_to_nearest(dtype, values)
    )


@pytest.mark.parametrize("dtype", [*K_QUANTS, *FEW_BITS])
@pytest.mark.parametrize(
    "kind", [*INPUTS, "reciprocal overflows", "positive", "one far out", "constant blocks"]
)
def test_k_quants_of_any_input_are_within_one_step(kind: str, dtype: str) -> None:
    more: dict[str, Callable[[], Array]] = {
        "reciprocal overflows": with_infinite_reciprocal,
        "positive": lambda: 1 + rng().random((64, 256)),
        "one far out": lambda: np.where(np.arange(256) == 77, 500, rng().standard_normal((8, 256))),
        "constant blocks": lambda: np.repeat(rng().standard_normal((64, 1)), 256, axis=1),
    }
    values = (INPUTS | more)[kind]().astype(np.float32)
    # Weights are clipped where that reduces the total error, but none by as much as a step of a
    # block whose levels span zero and all weights, plus the smallest f16.
    highest = {"Q2_K": 2, "Q3_K": 2, "Q4_K": 15, "Q5_K": 31, "Q6_K": 31}.get(dtype, 5)
    blocks = values.reshape(-1, 256)
    span = np.maximum(blocks.max(1), 0) - np.minimum(blocks.min(1), 0)
    if dtype not in ("Q2_K", "Q4_K", "Q5_K"):
        span = np.abs(blocks).max(1)
    allowed = span / highest + 2.0**-24
    deviation = np.abs(decoded(dtype, values).reshape(-1, 256) - blocks).max(1)
    assert (deviation <= allowed).all()


@pytest.mark.parametrize("dtype", [*SIMPLE, *K_QUANTS, *FEW_BITS])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_rejected(dtype: str, bad: float) -> None:
    values = np.zeros((300, 512), np.float32)
    values[250, 0] = values[201, 511] = bad
    with pytest.raises(ValueError, match=rf"row 201, column 511 is -?{str(bad).strip('-')}"):
        _core.quantize(dtype, values, threads=3)


@pytest.mark.parametrize("dtype", [*SIMPLE, *K_QUANTS, *FEW_BITS])
def test_values_whose_scale_exceeds_f16_are_rejected(dtype: str) -> None:
    values = np.ones((3, 512), np.float32)
    values[1, 300] = -3e38
    with pytest.raises(ValueError, match=rf"row 1, column 300 is -3e\+38, too large for {dtype}"):
        _core.quantize(dtype, values, threads=1)


def test_bad_arguments() -> None:
    values = np.zeros((2, 96), np.float32)
    with pytest.raises(ValueError, match=r"expected one of Q4_0, .*Q6_K"):
        _core.quantize("IQ3_S", values, threads=1)
    with pytest.raises(ValueError, match="2 rows of 96, expected a multiple of 256 for Q4_K"):
        _core.quantize("Q4_K", values, threads=1)
    with pytest.raises(ValueError, match="0 threads"):
        _core.quantize("Q4_0", values, threads=0)
    with pytest.raises(ValueError, match="1 dimensions, expected 2"):
        _core.quantize("Q4_0", values[0], threads=1)
    assert _core.quantize("Q4_0", values[:0], threads=1).shape == (0, 54)


def weighted_error(values: Array, decoded: Array, importance: Array) -> float:
    return float(np.mean(importance * (values.astype(np.float64) - decoded) ** 2))


@pytest.mark.parametrize("dtype", [*K_QUANTS, *FEW_BITS])
def test_importance_shifts_errors_to_unimportant_columns(dtype: str) -> None:
    """Columns of importance 100 have less error than without weighting, the others more."""
    values = rng().standard_normal((64, 512)).astype(np.float32)
    importance = np.where(rng().random(512) < 0.3, 100, 1).astype(np.float32)
    type = GGMLQuantizationType[dtype]

    def quantized(importance: Array | None) -> Array:
        blocks = _core.quantize(dtype, values, threads=2, importance=importance)
        return dequantize(blocks, type)

    plain, weighted = quantized(None), quantized(importance)
    assert weighted_error(values, weighted, importance) < 0.9 * weighted_error(
        values, plain, importance
    )
    assert error(values, weighted) > error(values, plain)
    np.testing.assert_array_equal(quantized(np.full(512, 7, np.float32)), plain)
    np.testing.assert_array_equal(quantized(np.zeros(512, np.float32)), plain)


@pytest.mark.parametrize("dtype", SIMPLE)
def test_simple_types_ignore_importance(dtype: str) -> None:
    values = rng().standard_normal((4, 64)).astype(np.float32)
    importance = rng().random(64).astype(np.float32)
    np.testing.assert_array_equal(
        _core.quantize(dtype, values, threads=1, importance=importance),
        _core.quantize(dtype, values, threads=1),
    )


def test_bad_importance() -> None:
    values = np.zeros((2, 256), np.float32)
    with pytest.raises(ValueError, match="255 numbers of importance, expected one for each of 256"):
        _core.quantize("Q4_K", values, threads=1, importance=np.ones(255, np.float32))
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="expected a number of 0 or more"):
            _core.quantize("Q4_K", values, threads=1, importance=np.full(256, bad, np.float32))
