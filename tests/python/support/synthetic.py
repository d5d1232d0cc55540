"""Models of real shapes with random weights: as large and as fast as real ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import lru_cache, partial
from itertools import chain, islice, product
from math import log2, prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGML_QUANT_VERSION,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    TokenType,
)
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from h2o_cpp import _core
from h2o_cpp.convert.conversion import add_value, family_of
from h2o_cpp.convert.modules import TensorSpec
from h2o_cpp.files.atomic import atomic_output
from h2o_cpp.measure.machine import n_processors
from h2o_cpp.quantize.mix import MIXES, Model, choose_types
from support.shapes import N_SPECIAL, SPECIAL, Config

# Types that nothing here can write: random bytes, except the f16 scale of a block at this byte.
RANDOM = {
    "IQ1_S": 0,
    "IQ2_XXS": 0,
    "IQ2_XS": 0,
    "IQ2_S": 0,
    "IQ3_XXS": 0,
    "IQ3_S": 0,
    "TQ1_0": 52,
    "TQ2_0": 64,
}

# Types of the weight matrices: also those of the converter and the quantizer.
TYPES = ("F32", "F16", "BF16", *MIXES, *RANDOM)

_PIECE = 1 << 22  # random values to generate and quantize; every tensor is made of them

_FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    **{name: mix.file_type for name, mix in MIXES.items()},
    **{name: LlamaFileType[f"MOSTLY_{name}"] for name in RANDOM},
}


def write_model(path: Path, config: Config, type_name: str, *, seed: int = 0) -> None:
    """Write the GGUF file of a model with the sizes that `config` says, as config.json does.

    type_name: one of TYPES; the mixes of the quantizer choose a type for each tensor. Weights are
    rows of a few million random values, each tensor's from another row on, so that a large model
    is written in the time its bytes take. Norms are 1, biases 0. Experts that are published in
    MXFP4 stay in it, as the converter leaves them.

    Raises ValueError for an unknown type, and for a config that no family can express.
    """
    if type_name not in TYPES:
        raise ValueError(f"unknown type {type_name!r}; choose from {', '.join(TYPES)}")
    family = family_of(config)
    specs = list(family.tensors(config))
    known = family.metadata(config)
    if family.predictor is not None and config.get("num_nextn_predict_layers"):
        known = {**known, **family.predictor.metadata(known, family.sizes(config)["layers"])}
        specs += family.predictor_tensors(config)
    metadata = {
        key if key.startswith("h2o.") else f"{family.architecture}.{key}": value
        for key, value in known.items()
    }
    architecture = {"general.architecture": family.architecture}
    types = _types(specs, architecture | metadata, type_name)

    with atomic_output(path) as output:
        with closing(GGUFWriter(output, family.architecture)) as writer:
            writer.add_type("model")
            writer.add_name(f"random weights, {type_name}")
            writer.add_file_type(_FILE_TYPES[type_name])
            writer.add_quantization_version(GGML_QUANT_VERSION)
            for key, value in metadata.items():
                add_value(writer, key, value)
            _add_vocabulary(writer, config["vocab_size"], add_bos=family.add_bos)
            _write_header(writer, specs, types)
        with open(output, "r+b") as file:
            _write_data(file, specs, types, np.random.default_rng(seed))


def _write_header(
    writer: GGUFWriter, specs: Sequence[TensorSpec], types: Mapping[str, GGMLQuantizationType]
) -> None:
    for spec in specs:
        writer.add_tensor_info(
            spec.gguf,
            spec.written_shape,
            np.dtype(np.float32),  # not uint8, which would make the shape count bytes
            _nbytes(spec, types[spec.gguf]),
            raw_dtype=types[spec.gguf],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _write_data(
    file: BinaryIO,
    specs: Sequence[TensorSpec],
    types: Mapping[str, GGMLQuantizationType],
    random: np.random.Generator,
) -> None:
    """After the header, in parallel, because allocating file pages is slow."""
    most_rows = max(spec.shape[0] for spec in specs)
    draw = lru_cache(maxsize=8)(partial(_rows, random, most_rows))
    offset = _padded(file.seek(0, os.SEEK_END))
    with ThreadPoolExecutor() as pool:
        writes = []
        for spec in specs:
            shape, type = spec.written_shape, types[spec.gguf]
            if len(shape) == 1:
                value = 1 if spec.gguf.endswith("norm.weight") else 0
                rows, first = np.full(shape, value, np.float32).view(np.uint8)[None], 0
            else:
                rows = draw(shape[-1], type)
                first = int(random.integers(len(rows)))
            nbytes = _nbytes(spec, type)
            writes.append(pool.submit(_write_rows, file.fileno(), offset, rows, first, nbytes))
            offset += _padded(nbytes)
        for write in writes:
            write.result()
    file.truncate(offset)


def _write_rows(file: int, offset: int, rows: NDArray[np.uint8], first: int, nbytes: int) -> None:
    """Repeat the rows, from row `first` on, until this many bytes are written."""
    data = rows.data.cast("B")
    begin = first * rows.shape[1]
    end = offset + nbytes
    while offset < end:
        offset += os.pwrite(file, data[begin : begin + end - offset], offset)
        begin = 0


def _nbytes(spec: TensorSpec, type: GGMLQuantizationType) -> int:
    block_size, block_bytes = GGML_QUANT_SIZES[type]
    return prod(spec.written_shape) // block_size * block_bytes


def _padded(nbytes: int) -> int:
    """The offset aligned for the next tensor."""
    return GGUFWriter.ggml_pad(nbytes, GGUF_DEFAULT_ALIGNMENT)


def _types(
    specs: list[TensorSpec], metadata: Config, type_name: str
) -> dict[str, GGMLQuantizationType]:
    """Returns the converter's and the quantizer's choice: F32 except for matrices."""
    shapes = {spec.gguf: spec.written_shape for spec in specs}
    types = dict.fromkeys(shapes, GGMLQuantizationType.F32)
    stored = [spec.gguf for spec in specs if spec.mxfp4_rows is not None]
    kept = dict.fromkeys(stored, GGMLQuantizationType.MXFP4)
    if type_name in MIXES:
        return types | choose_types(MIXES[type_name], Model.of(metadata), shapes) | kept
    matrices = [
        name
        for name, shape in shapes.items()
        if len(shape) > 1 and name.endswith(".weight") and name != "position_embd.weight"
    ]
    return types | dict.fromkeys(matrices, GGMLQuantizationType[type_name]) | kept


def _rows(
    random: np.random.Generator, most: int, n_cols: int, type: GGMLQuantizationType
) -> NDArray[np.uint8]:
    """Random rows as blocks; outputs have about the magnitude of inputs."""
    n_rows = min(most, max(1, _PIECE // n_cols))
    if type is GGMLQuantizationType.MXFP4:
        return _mxfp4_rows(random, n_rows, n_cols)
    if type.name in RANDOM:
        return _random_rows(random, n_rows, n_cols, type)
    values = random.standard_normal((n_rows, n_cols), np.float32)
    values /= np.float32(n_cols**0.5)
    if type is GGMLQuantizationType.F32:
        return values.view(np.uint8)
    if type in (GGMLQuantizationType.F16, GGMLQuantizationType.BF16):
        return quantize(values, type).view(np.uint8)
    return _core.quantize(type.name, values, threads=n_processors())


def _mxfp4_rows(random: np.random.Generator, n_rows: int, n_cols: int) -> NDArray[np.uint8]:
    """A power of two per block, and two elements per byte, whose mean square is 8.6."""
    size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType.MXFP4]
    blocks = random.integers(0, 256, (n_rows, n_cols // size, nbytes), np.uint8)
    blocks[..., 0] = 127 + round(log2((8.6 * n_cols) ** -0.5))
    return blocks.reshape(n_rows, -1)


def _random_rows(
    random: np.random.Generator, n_rows: int, n_cols: int, type: GGMLQuantizationType
) -> NDArray[np.uint8]:
    """Random blocks; the scale comes from decoding some with a scale of one."""
    size, nbytes = GGML_QUANT_SIZES[type]
    blocks = random.integers(0, 256, (n_rows, n_cols // size, nbytes), np.uint8)
    at = RANDOM[type.name]
    scale = blocks[..., at : at + 2].view(np.float16)
    scale[:] = 1
    deviation = dequantize(blocks[: 1 + 4096 // n_cols].reshape(-1, nbytes), type).std()
    scale[:] = n_cols**-0.5 / deviation
    return blocks.reshape(n_rows, -1)


def _add_vocabulary(writer: GGUFWriter, n_vocab: int, *, add_bos: bool) -> None:
    """A byte-level BPE: special tokens, bytes, then pairs and triples."""
    # GPT-2's character for each byte: itself if printable, else from U+0100 on.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = [chr(code) for code in (*visible, *range(0x100, 0x200 - len(visible)))]
    n_merges = n_vocab - N_SPECIAL - len(characters)
    if not 0 <= n_merges <= len(characters) ** 2 + len(characters) ** 3:
        raise ValueError(
            f"vocab_size {n_vocab}, expected at most the number of bytes, pairs and triples"
        )
    pairs = list(product(characters, repeat=2))
    triples = product(map("".join, pairs), characters)
    merges = list(islice(chain(pairs, triples), n_merges))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*SPECIAL, *characters, *(left + right for left, right in merges)])
    writer.add_token_types(
        [TokenType.CONTROL] * N_SPECIAL + [TokenType.NORMAL] * (n_vocab - N_SPECIAL)
    )
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_bos_token_id(0)
    writer.add_pad_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(add_bos)
