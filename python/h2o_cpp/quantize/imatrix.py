"""Importance matrices in llama.cpp's formats: mean squares of the inputs of each weight."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_cpp import _core
from h2o_cpp.arguments import check_context, check_int
from h2o_cpp.budget.policy import Policy
from h2o_cpp.files.atomic import atomic_output, check_output
from h2o_cpp.model.session import chunks, open_model, open_session
from h2o_cpp.model.tokenizer import Tokenizer

Importance: TypeAlias = NDArray[np.float32]

# Suffixes of tensor names: sums of squares, and the number of inputs.
_SUMS, _COUNTS = ".in_sum2", ".counts"


def make_imatrix(
    model: str | os.PathLike[str],
    text: str,
    output: str | os.PathLike[str],
    *,
    n_ctx: int = 512,
    n_chunks: int | None = None,
    threads: int | None = None,
    overwrite: bool = False,
) -> int:
    """Write the importance matrix of a model on a text, in llama.cpp's GGUF format, for quantize().

    text: typical input of the model; a few hundred thousand tokens suffice.
    n_ctx: tokens per chunk, read with a full cache; 0: the trained length. n_chunks: most chunks to
    read; default: the whole text. Runs on the CPU. An expert without tokens has a count of 0.

    Returns the number of tokens read. Raises FileExistsError unless overwrite is set, and
    ValueError for a text without tokens.
    """
    if n_ctx != 0:
        check_int("n_ctx", n_ctx, 2)
    output = Path(output)
    check_output(output, overwrite=overwrite)
    core = open_model(model, device="cpu", threads=threads)
    n_ctx = check_context(n_ctx, core.n_ctx_train)
    tokenizer = Tokenizer.of_model(core)
    beginning = tokenizer.encode("")
    tokens = tokenizer.encode(text, add_special=False)
    per_chunk = n_ctx - len(beginning)
    if n_chunks is not None:
        tokens = tokens[: per_chunk * check_int("n_chunks", n_chunks, 1)]
    if len(tokens) == 0:
        raise ValueError("the text has no tokens")
    begins = range(0, len(tokens), per_chunk)
    session = open_session(core, Policy.full(), n_ctx=n_ctx, n_batch=n_ctx, positions="original")
    matrix = _core.ImportanceMatrix(core)
    for begin in tqdm(begins, unit="chunk", disable=None, leave=False):
        session.reset(0)
        chunk = np.asarray([*beginning, *tokens[begin : begin + per_chunk]], np.int32)
        for some in chunks(session, chunk):
            session.greedy([(0, some)])
    matrix.end()
    with atomic_output(output) as partial:
        _write(matrix, partial, n_ctx, len(begins))
    return len(tokens) + len(begins) * len(beginning)


def _write(matrix: _core.ImportanceMatrix, path: Path, n_ctx: int, n_chunks: int) -> None:
    writer = GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text"])
    writer.add_uint32("imatrix.chunk_count", n_chunks)
    writer.add_uint32("imatrix.chunk_size", n_ctx)
    for name, squares, counts in matrix.sums():
        writer.add_tensor(name + _SUMS, squares.astype(np.float32))
        writer.add_tensor(name + _COUNTS, counts.astype(np.float32).reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
        name.removesuffix(_SUMS): _means(path, name, sums, found)
        for name, sums in found.items()
        if name.endswith(_SUMS)
    }


def _means(path: Path, name: str, sums: Importance, found: Mapping[str, Importance]) -> Importance:
    """Means; 1 for every column of an expert without inputs."""
    counts = found.get(name.removesuffix(_SUMS) + _COUNTS)
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
