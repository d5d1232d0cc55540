"""Importance matrices in llama.cpp's formats: mean squares of the inputs of each weight."""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from h2o_cpp import _core

Importance = npt.NDArray[np.float32]

# Suffixes of tensor names: sums of squares, and the number of inputs.
SUMS, COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: Path) -> dict[str, Importance]:
    """The mean square of the input of each column of a tensor, by tensor name.

    Each is [n, n_cols], where n is 1 or the number of experts. Reads GGUF and llama.cpp's older
    format (imatrix.dat).

    Raises FileNotFoundError when there is no such file, ValueError when it is neither.
    """
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    matrices = _read_gguf(path) if is_gguf else _read_dat(path)
    for name, values in matrices.items():
        if not np.isfinite(values).all() or (values < 0).any():
            raise ValueError(f"{path}: {name} has numbers that are negative or not finite")
    return matrices


def _read_gguf(path: Path) -> dict[str, Importance]:
    file = _core.GgufFile(path)
    if (kind := file.metadata().get("general.type")) != "imatrix":
        raise ValueError(f"{path}: general.type is {kind!r}, expected 'imatrix'")
    found: dict[str, Importance] = {}
    for index, (name, dtype, shape, *_) in enumerate(file.tensors()):
        if dtype != "F32":
            raise ValueError(f"{path}: tensor {name} is {dtype}, expected F32")
        values = np.asarray(file.tensor_data(index)).view(np.float32)
        found[name] = values.reshape(-1, shape[-1]) if shape else values.reshape(1, -1)
    return {
        name.removesuffix(SUMS): _means(path, name, sums, found)
        for name, sums in found.items()
        if name.endswith(SUMS)
    }


def _means(path: Path, name: str, sums: Importance, found: Mapping[str, Importance]) -> Importance:
    """Means; 1 for every column of an expert without inputs."""
    counts = found.get(name.removesuffix(SUMS) + COUNTS)
    if counts is None or counts.size != len(sums):
        raise ValueError(f"{path}: {name} has no count for each of {len(sums)} matrices")
    per_matrix = counts.reshape(-1, 1)
    return np.where(per_matrix > 0, sums / np.maximum(per_matrix, 1), 1).astype(np.float32)


def _read_dat(path: Path) -> dict[str, Importance]:
    """int32 n, then n times: a name, the number of calls, and sums to divide by it."""
    data = path.read_bytes()
    at = 0

    def integer() -> int:
        nonlocal at
        [value] = struct.unpack_from("<i", data, at)
        at += 4
        if value < 0:
            raise ValueError("a size is negative")
        return int(value)

    matrices: dict[str, Importance] = {}
    try:
        for _ in range(integer()):
            length = integer()
            name = data[at : at + length].decode("utf-8")
            at += length
            calls, size = integer(), integer()
            values = np.frombuffer(data, "<f4", size, at)
            at += values.nbytes
            matrices[name] = (values / max(calls, 1)).astype(np.float32).reshape(1, -1)
    except (struct.error, ValueError) as error:
        reason = "it ends too early" if isinstance(error, struct.error) else error
        raise ValueError(f"{path}: not an importance matrix ({reason})") from error
    if not matrices:
        raise ValueError(f"{path}: not an importance matrix (it has no tensors)")
    return matrices
