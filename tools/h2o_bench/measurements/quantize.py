"""The quantizer's error and speed beside llama.cpp's, by llama-cpp-python.

Both quantize the same tensors on one thread, the best of 5 rounds; seconds are of CPU time per
million weights, over the tensors. The error is the root mean square of what decoding gives less
the original, as a share of that of the original; the ratio is ours over llama.cpp's.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from h2o_bench.results import Row
from h2o_cpp import _core
from h2o_cpp.convert.checkpoint import open_tensors

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

Array = np.ndarray[Any, Any]
Quantize = Callable[[str, Array], Array]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="trained weights to take")
    parser.add_argument("--rows", type=int, default=1024, help="of random matrices of 1024 columns")


def llama_quantizer() -> Quantize:
    """ggml_quantize_chunk() of llama-cpp-python's library."""
    import llama_cpp

    [library] = (Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so")
    function = ctypes.CDLL(str(library)).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]

    def quantize(dtype: str, values: Array) -> Array:
        type = GGMLQuantizationType[dtype]
        block_size, type_size = GGML_QUANT_SIZES[type]
        n_rows, n_cols = values.shape
        out = np.empty((n_rows, n_cols // block_size * type_size), np.uint8)
        function(type, values.ctypes.data, out.ctypes.data, 0, n_rows, n_cols, None)
        return out

    return quantize


def error_and_seconds(quantize: Quantize, dtype: str, values: Array) -> tuple[float, float]:
    """The error, and CPU seconds per million weights, the best of 5 rounds."""
    seconds = []
    for _ in range(5):
        begin = process_time()
        blocks = quantize(dtype, values)
        seconds.append(process_time() - begin)
    exact = values.astype(np.float64)
    error = ((exact - dequantize(blocks, GGMLQuantizationType[dtype])) ** 2).mean()
    return float(np.sqrt(error / (exact**2).mean())), min(seconds) * 1e6 / values.size


def measure(args: argparse.Namespace) -> Iterator[Row]:
    rng, shape = np.random.default_rng(0), (args.rows, 1024)
    outliers = np.where(rng.random(shape) < 1 / 256, 30, 1)
    tensors: dict[str, Array] = {
        "gaussian": rng.standard_normal(shape),
        "heavy tails": rng.standard_t(4, shape),
        "outliers": outliers * rng.standard_normal(shape),
        "8-bit weights": np.rint(40 * rng.standard_normal(shape)) / 512,
    }
    if args.checkpoint is not None:
        matrices = [t for t in open_tensors(args.checkpoint).values() if len(t.shape) == 2]
        readers = [t.read for t in matrices if t.shape[1] % 256 == 0 and t.read is not None]
        rows = [read().reshape(-1, 256) for read in readers]
        tensors[args.checkpoint.name] = np.concatenate(rows)
    theirs = llama_quantizer()

    def ours(dtype: str, values: Array) -> Array:
        return _core.quantize(dtype, values, threads=1)

    for dtype in TYPES:
        found: list[tuple[float, float]] = []
        other: list[tuple[float, float]] = []
        for values in (tensor.astype(np.float32) for tensor in tensors.values()):
            found.append(error_and_seconds(ours, dtype, values))
            other.append(error_and_seconds(theirs, dtype, values))
        yield {
            "type": dtype,
            **{f"{name}, %": 100 * one[0] for name, one in zip(tensors, found, strict=True)},
            "ratio": [a[0] / b[0] for a, b in zip(found, other, strict=True)],
            "seconds": [one[1] for one in found],
            "llama.cpp's": [one[1] for one in other],
        }
