"""Measuring importance matrices: mean squares of the inputs of each weight on a text."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_cpp import _core
from h2o_cpp.model.arguments import check_context, check_int
from h2o_cpp.model.atomic import atomic_output, check_output
from h2o_cpp.model.policy import Policy
from h2o_cpp.model.session import chunks, open_model, open_session
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.quantize.imatrix import COUNTS, SUMS


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
    n_ctx: tokens per chunk, read with a full cache. n_chunks: most chunks to read; default: the
    whole text. Runs on the CPU. An expert without tokens has a count of 0.

    Returns the number of tokens read. Raises FileExistsError unless overwrite is set, and
    ValueError for a text without tokens.
    """
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
        writer.add_tensor(name + SUMS, squares.astype(np.float32))
        writer.add_tensor(name + COUNTS, counts.astype(np.float32).reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
