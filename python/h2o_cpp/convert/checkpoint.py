"""Hugging Face checkpoints: config.json, and weights from safetensors or PyTorch files."""

import importlib
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a checkpoint, whose values are read on request.

    `read` is None unless the type is f64, f32, f16 or bf16 (masks, indices, quantized weights);
    `read_bytes` reads u8.
    """

    shape: tuple[int, ...]
    read: Callable[[], Values] | None
    read_bytes: Callable[[], Bytes] | None = None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises FileNotFoundError when there is no such file, ValueError when it is not a JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if isinstance(value, dict):
        return value
    raise ValueError(f"{path}: expected a JSON object, found a {type(value).__name__}")


def read_optional_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file; raises as read_json."""
    return read_json(path) if path.exists() else {}


def open_tensors(directory: Path) -> dict[str, SourceTensor]:
    """The tensors of a checkpoint by their HF names, without reading values.

    Prefers model.safetensors over pytorch_model.bin, and a whole file over shards.
    Raises FileNotFoundError if the directory has no weights, and ValueError if a file is damaged,
    a shard is missing or PyTorch is needed but not installed.
    """
    for name, open_file in (
        ("model.safetensors", _open_safetensors),
        ("pytorch_model.bin", _open_torch),
    ):
        whole, index = directory / name, directory / f"{name}.index.json"
        if whole.is_file():
            return open_file(whole)
        if index.is_file():
            return _open_shards(index, open_file)
    raise FileNotFoundError(
        f"{directory}: no weights (model.safetensors or pytorch_model.bin, whole or with an index)"
    )


def _open_shards(
    index: Path, open_file: Callable[[Path], dict[str, SourceTensor]]
) -> dict[str, SourceTensor]:
    """The tensors of all shards that an index names in its weight_map {tensor name: file name}."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        # A name in the checkpoint's directory, not a path out of it.
        isinstance(file, str) and Path(file).name == file
        for file in weight_map.values()
    ):
        raise ValueError(f"{index}: weight_map must give a file name for each tensor")
    tensors: dict[str, SourceTensor] = {}
    for file in sorted(set(weight_map.values())):
        if not (index.parent / file).is_file():
            raise ValueError(f"{index}: shard {file} is missing")
        tensors |= open_file(index.parent / file)
    for name, file in weight_map.items():
        if name not in tensors:
            raise ValueError(f"{index}: tensor {name} is not in shard {file}")
    return tensors


def _decode_bf16(data: Bytes) -> Values:
    """bfloat16 is the upper half of a float32."""
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


# safetensors dtype -> bytes per element, bytes -> float32
_DECODERS: dict[str, tuple[int, Callable[[Bytes], Values]]] = {
    "F64": (8, lambda data: data.view("<f8").astype(np.float32)),
    "F32": (4, lambda data: data.view("<f4").astype(np.float32)),
    "F16": (2, lambda data: data.view("<f2").astype(np.float32)),
    "BF16": (2, _decode_bf16),
}


def _open_safetensors(path: Path) -> dict[str, SourceTensor]:
    """Tensors of a safetensors file, memory-mapped; each is checked to be within the file.

    Format: the header's size (u64), the header as JSON, {name: {dtype, shape, data_offsets}}, and
    the data, to which the offsets refer.
    """
    try:
        file = np.asarray(np.memmap(path, np.uint8, mode="r"))
        start = 8 + int.from_bytes(file[:8].tobytes(), "little")
        if start > file.size:
            raise ValueError(f"it ends at byte {file.size}, within the header")
        header = json.loads(file[8:start].tobytes())
        header.pop("__metadata__", None)
        return {name: _safetensor(name, entry, file[start:]) for name, entry in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error


def _safetensor(name: str, entry: Mapping[str, Any], data: Bytes) -> SourceTensor:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(isinstance(extent, int) and extent >= 0 for extent in (*shape, begin, end)):
        raise ValueError(f"tensor {name} has a malformed shape or offset")
    if end > data.size:
        raise ValueError(f"tensor {name} ends beyond the file")
    if dtype not in _DECODERS and dtype != "U8":
        return SourceTensor(shape, None)
    element_size, decode = _DECODERS.get(dtype, (1, None))
    if end - begin != prod(shape) * element_size:
        raise ValueError(f"tensor {name} is not as large as its shape and dtype say")
    if decode is None:
        return SourceTensor(shape, None, lambda: data[begin:end].reshape(shape))
    return SourceTensor(shape, lambda: decode(data[begin:end]).reshape(shape))


def _open_torch(path: Path) -> dict[str, SourceTensor]:
    """Tensors of a PyTorch file; weights_only prevents its pickle from running code."""
    try:
        # Not an import statement, so that mypy does not need the optional PyTorch.
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ValueError(
            f"{path}: reading this file needs PyTorch, which is not installed;"
            " `pip install torch`, or use a safetensors checkpoint"
        ) from error
    try:
        # Only the zip format (default since PyTorch 1.6) can be memory-mapped.
        mmap = zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch.load documents no exceptions for damaged files
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path}: not a readable PyTorch weights file ({reason})") from error

    def source(name: str, tensor: Any) -> SourceTensor:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{path}: {name} is not a tensor")
        if not tensor.is_floating_point():
            return SourceTensor(tuple(tensor.shape), None)
        return SourceTensor(tuple(tensor.shape), lambda: tensor.detach().float().numpy())

    if isinstance(state, Mapping):
        return {name: source(name, tensor) for name, tensor in state.items()}
    raise ValueError(f"{path}: expected tensors by name, found a {type(state).__name__}")
