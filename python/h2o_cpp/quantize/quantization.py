"""Quantizes the tensors of a GGUF file."""

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGMLQuantizationType
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGUF_VERSION
from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_cpp import _core
from h2o_cpp.arguments import thread_count
from h2o_cpp.files.atomic import atomic_output, check_output
from h2o_cpp.files.model_files import find_model
from h2o_cpp.files.stored_metadata import gguf_string, metadata_entry
from h2o_cpp.quantize.imatrix import Importance, read_imatrix
from h2o_cpp.quantize.mix import MIXES, Mix, Model, Shape, choose_types

# Types that may be quantized without --allow-requantize.
_PRECISE = ("F32", "F16", "BF16", "Q8_0")

# Weights quantized at a time; limits memory and the delay of an interrupt.
_PIECE = 1 << 22


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the source, number `index` of `file`, and its new type."""

    file: _core.GgufFile
    index: int
    name: str
    shape: Shape
    source_nbytes: int
    source_type: str
    type: GGMLQuantizationType
    importance: Importance | None = None

    @property
    def is_copied(self) -> bool:
        return self.type.name == self.source_type

    @property
    def nbytes(self) -> int:
        block_size, type_size = GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // block_size * type_size

    def pieces(self, threads: int) -> Iterator[tuple[npt.NDArray[Any], int]]:
        """The bytes to write in pieces, each with the number of source bytes."""
        data = self.file.tensor_data(self.index)
        if self.is_copied:
            for begin in range(0, len(data), _PIECE):
                piece = data[begin : begin + _PIECE]
                yield piece, len(piece)
            return
        n_cols = self.shape[-1]
        rows = data.reshape(prod(self.shape) // n_cols, -1)
        # Each expert may have an importance of its own.
        n_matrices = 1 if self.importance is None else len(self.importance)
        n_rows = len(rows) // n_matrices
        step = max(1, _PIECE // n_cols)
        for matrix in range(n_matrices):
            importance = None if self.importance is None else self.importance[matrix]
            end = (matrix + 1) * n_rows
            for first in range(matrix * n_rows, end, step):
                piece = rows[first : min(first + step, end)]
                values = _core.dequantize(self.source_type, piece.reshape(-1)).reshape(-1, n_cols)
                try:
                    blocks = self._encode(values, threads, importance)
                except ValueError as error:
                    where = f"from row {first}: " if first else ""
                    raise ValueError(f"tensor {self.name}: {where}{error}") from None
                yield blocks, piece.nbytes

    def _encode(
        self, values: npt.NDArray[np.float32], threads: int, importance: Importance | None
    ) -> npt.NDArray[Any]:
        if self.type is not GGMLQuantizationType.F16:
            name = self.type.name
            return _core.quantize(name, values, threads=threads, importance=importance)
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if not np.isfinite(half).all():
            raise ValueError("there are values beyond the range of F16")
        return half


def quantize(
    source: str | os.PathLike[str],
    output: Path,
    type_name: str,
    *,
    threads: int | None = None,
    allow_requantize: bool = False,
    imatrix: Path | None = None,
    overwrite: bool = True,
) -> None:
    """Write the model `source` to `output` with quantized matrices.

    source: a GGUF file, or anything find_model accepts. A split model becomes one file.
    type_name: one of MIXES, such as Q4_K_M.
    threads: default: one per processor. The result does not depend on them.
    imatrix: an importance matrix of this model, which weights the errors of columns in K-quants and
        IQ4; other types ignore it.

    Metadata is copied byte for byte, except general.file_type and general.quantization_version.
    A bar shows progress if stderr is a terminal. A few million weights are in memory at a time.
    `output` is complete or unchanged.

    Raises FileNotFoundError if `source`, `imatrix` or the directory of `output` does not exist;
    FileExistsError if `output` exists, unless `overwrite`; ValueError for an unknown type, an
    invalid `imatrix` or one of another model, a damaged file, weights that are not finite, and
    weights of fewer than 8 bits, unless `allow_requantize`.
    """
    name = type_name.upper()
    mix = MIXES.get(f"{name}_M" if name in ("Q3_K", "Q4_K", "Q5_K") else name)  # llama.cpp's names
    if mix is None:
        raise ValueError(f"type_name={type_name!r}, expected one of {', '.join(MIXES)}")
    threads = thread_count(threads) or os.cpu_count() or 1
    files = _core.GgufShards(find_model(source)).files
    if any(output.exists() and output.samefile(file.path) for file in files):
        raise ValueError(f"{output}: the output is the input")
    check_output(output, overwrite=overwrite)
    metadata = files[0].metadata()
    if metadata.get("general.type") == "imatrix":
        raise ValueError(f"{files[0].path}: an importance matrix, expected a model")
    importances = {} if imatrix is None else read_imatrix(imatrix)
    tensors = _plan(files, mix, Model.of(metadata), importances)
    if imatrix is not None and not any(tensor.importance is not None for tensor in tensors):
        raise ValueError(f"{imatrix}: the importance matrix has none of the tensors of {source}")
    for tensor in tensors:
        _check(tensor, allow_requantize)

    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    with (
        atomic_output(output) as path,
        path.open("wb") as file,
        tqdm(
            total=sum(tensor.source_nbytes for tensor in tensors),
            desc="quantizing",
            unit="B",
            unit_scale=True,
            disable=None,  # unless stderr is a terminal
        ) as bar,
    ):
        file.write(_header(_metadata(files[0], mix), tensors, alignment))
        for tensor in tensors:
            for piece, nbytes in tensor.pieces(threads):
                file.write(piece.data)
                bar.update(nbytes)
            file.write(bytes(-tensor.nbytes % alignment))


def _plan(
    files: Sequence[_core.GgufFile], mix: Mix, model: Model, importances: Mapping[str, Importance]
) -> list[_Tensor]:
    found = [
        (file, index, *tensor) for file in files for index, tensor in enumerate(file.tensors())
    ]
    shapes = {name: shape for _, _, name, _, shape, _ in found}
    types = choose_types(mix, model, shapes, has_imatrix=bool(importances))
    return [
        _Tensor(
            file,
            index,
            name,
            shape,
            nbytes,
            source,
            types.get(name, GGMLQuantizationType[source]),
            _importance(name, shape, importances) if name in types else None,
        )
        for file, index, name, source, shape, nbytes in found
    ]


def _importance(
    name: str, shape: Shape, importances: Mapping[str, Importance]
) -> Importance | None:
    """[1, n_cols], or one row per expert; None if the matrix does not have the tensor."""
    found = importances.get(name)
    if found is None:
        return None
    n_matrices = found.size // shape[-1]
    n_experts = shape[0] if len(shape) > 2 else 1
    if found.size % shape[-1] or n_matrices not in (1, n_experts):
        raise ValueError(
            f"tensor {name}: the importance matrix has {found.size} numbers, expected"
            f" {shape[-1]} for each of {n_experts} matrices"
        )
    return np.ascontiguousarray(found.reshape(n_matrices, shape[-1]))


def _check(tensor: _Tensor, allow_requantize: bool) -> None:
    if tensor.is_copied or tensor.source_type in _PRECISE:
        return
    what = f"{tensor.file.path}: tensor {tensor.name} is {tensor.source_type}"
    if tensor.source_type not in _core.dtypes():
        raise ValueError(f"{what}, which cannot be read")
    if not allow_requantize:
        raise ValueError(
            f"{what} already, and quantizing it again loses precision twice"
            " (--allow-requantize permits it)"
        )


def _metadata(file: _core.GgufFile, mix: Mix) -> list[bytes]:
    """The file's metadata entries with the changed ones, in the same order."""
    entries = {key: entry for key, entry in file.metadata_entries() if not key.startswith("split.")}
    for key, value in (
        ("general.quantization_version", GGML_QUANT_VERSION),
        ("general.file_type", mix.file_type),
    ):
        entries[key] = metadata_entry(key, value)
    return list(entries.values())


def _header(metadata: Sequence[bytes], tensors: Sequence[_Tensor], alignment: int) -> bytes:
    """Everything before the tensor data, padding included."""
    header = struct.pack("<IIQQ", GGUF_MAGIC, GGUF_VERSION, len(tensors), len(metadata))
    header += b"".join(metadata)
    offset = 0
    for tensor in tensors:
        n_dims = len(tensor.shape)
        header += gguf_string(tensor.name)
        header += struct.pack(f"<I{n_dims}Q", n_dims, *reversed(tensor.shape))
        header += struct.pack("<IQ", tensor.type, offset)
        offset += tensor.nbytes + -tensor.nbytes % alignment
    return header + bytes(-len(header) % alignment)
