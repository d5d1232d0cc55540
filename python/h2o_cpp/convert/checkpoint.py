"""Hugging Face checkpoints: config.json, and weights from safetensors or PyTorch files."""

import importlib
import json
import re
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
Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a checkpoint, whose values are read on request.

    `read` is None unless the type is f64, f32, f16, bf16 or f8 (masks, indices, quantized weights);
    `read_bytes` reads u8, `read_integers` any integers.
    """

    shape: tuple[int, ...]
    read: Callable[[], Values] | None
    read_bytes: Callable[[], Bytes] | None = None
    read_integers: Callable[[], Integers] | None = None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises FileNotFoundError when there is no such file, ValueError when it is not a JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    _expect_data(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if isinstance(value, dict):
        return value
    raise ValueError(f"{path}: expected a JSON object, found a {type(value).__name__}")


_POINTER = b"version https://git-lfs"


def _expect_data(path: Path) -> None:
    """Raise ValueError for what Git leaves instead of a large file."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(
                f"{path}: a Git LFS pointer, without the data; run git lfs pull, or download it"
                " again"
            )


def read_optional_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file; raises as read_json."""
    return read_json(path) if path.exists() else {}


def open_tensors(directory: Path) -> dict[str, SourceTensor]:
    """The tensors of a checkpoint by their HF names, without reading values.

    Prefers model.safetensors over pytorch_model.bin, and a whole file over shards, which need no
    index. Names are those of the model: without what training put before them.
    Raises FileNotFoundError if the directory has no weights, and ValueError if a file is damaged,
    a shard is missing, PyTorch is needed but not installed, or the weights are those of an adapter.
    """
    return _without_wrappers(directory, _open_tensors(directory))


# Files that people pass instead of weights -> what they are, and what to do.
_INSTEAD_OF_WEIGHTS = {
    "adapter_model.*": "a LoRA adapter; merge it into its base model (merge_and_unload of peft)",
    "consolidated*": "Mistral's or Meta's own layout; take the layout of transformers",
    "weights*.npz": "MLX's old layout; take the original checkpoint",
    "*.gguf": "GGUF already; run it with h2o-cpp run -m FILE",
    "tf_model.h5": "TensorFlow's; take model.safetensors of the same repository",
    "flax_model.msgpack": "Flax's; take model.safetensors of the same repository",
    "*.onnx": "ONNX's; take the original checkpoint",
    "*.nemo": "NeMo's; take the layout of transformers",
    "*.safetensors": "no name of a checkpoint's file; call it model.safetensors if it is whole",
}


def _open_tensors(directory: Path) -> dict[str, SourceTensor]:
    for name, open_file in (
        ("model.safetensors", _open_safetensors),
        ("pytorch_model.bin", _open_torch),
    ):
        whole, index = directory / name, directory / f"{name}.index.json"
        if whole.is_file():
            return open_file(whole)
        if index.is_file():
            return _open_shards(index, open_file)
        if shards := _numbered_shards(directory, name):
            tensors: dict[str, SourceTensor] = {}
            for shard in shards:
                tensors |= open_file(shard)
            return tensors
    for pattern, what in _INSTEAD_OF_WEIGHTS.items():
        if others := sorted(file.name for file in directory.glob(pattern)):
            raise FileNotFoundError(
                f"{directory}: no weights (model.safetensors or pytorch_model.bin), but"
                f" {others[0]}: {what}"
            )
    raise FileNotFoundError(
        f"{directory}: no weights (model.safetensors or pytorch_model.bin, whole or with an index)"
    )


def _numbered_shards(directory: Path, name: str) -> list[Path]:
    """The shards of a file without an index; ValueError if there are some, but not all."""
    stem, suffix = name.rsplit(".", 1)
    found: dict[int, Path] = {}
    total = 0
    for file in directory.glob(f"{stem}-*-of-*.{suffix}"):
        if match := re.fullmatch(rf"{stem}-(\d+)-of-(\d+)\.{suffix}", file.name):
            found[int(match[1])] = file
            total = max(total, int(match[2]))
    missing = [i for i in range(1, total + 1) if i not in found]
    if missing or len(found) != total:
        raise ValueError(
            f"{directory}: found {len(found)} of {total} shards {stem}-*.{suffix}"
            f" and no {name}.index.json"
        )
    return [found[i] for i in sorted(found)]


# torch.compile, DataParallel, PEFT, FSDP and Lightning put these before the names of a model.
_WRAPPERS = (
    "module.",
    "_orig_mod.",
    "base_model.model.",
    "_fsdp_wrapped_module.",
    "_forward_module.",
)


def _without_wrappers(directory: Path, tensors: dict[str, SourceTensor]) -> dict[str, SourceTensor]:
    if any(".lora_A." in name or ".lora_B." in name for name in tensors):
        raise ValueError(
            f"{directory}: the weights are those of a LoRA adapter; merge it into its base model"
            " (merge_and_unload of peft) and convert the result"
        )
    renamed = {_unwrapped(name): tensor for name, tensor in tensors.items()}
    if any(name.startswith("model.model.") for name in renamed):
        renamed = {name.removeprefix("model."): tensor for name, tensor in renamed.items()}
    return renamed if len(renamed) == len(tensors) else tensors


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        if name.startswith(wrapper):
            return _unwrapped(name.removeprefix(wrapper))
    return name.replace("._orig_mod.", ".").replace("._fsdp_wrapped_module.", ".")


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


def _float8(exponent_bits: int, bias: int) -> Values:
    """The values of all 256 bytes; NaN and infinities are those of the format."""
    bytes_ = np.arange(256)
    fraction_bits = 7 - exponent_bits
    exponent = bytes_ >> fraction_bits & ((1 << exponent_bits) - 1)
    fraction = (bytes_ & ((1 << fraction_bits) - 1)) / 2.0**fraction_bits
    normal = np.where(exponent > 0, 1 + fraction, 2 * fraction) * 2.0 ** (exponent - bias)
    values = np.where(bytes_ > 127, -normal, normal)
    if exponent_bits == 4:  # no infinities, and one NaN of each sign
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[exponent == 31] = np.nan
        values[[0x7C, 0xFC]] = np.inf, -np.inf
    floats: Values = values.astype(np.float32)
    return floats


E4M3, _E5M2 = _float8(4, 7), _float8(5, 15)

# safetensors dtype -> its integers
_INTEGERS = {
    **{"I8": "i1", "U8": "u1", "I16": "<i2", "U16": "<u2"},
    **{"I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8"},
}

# safetensors dtype -> bytes per element, bytes -> float32
_DECODERS: dict[str, tuple[int, Callable[[Bytes], Values]]] = {
    "F64": (8, lambda data: data.view("<f8").astype(np.float32)),
    "F32": (4, lambda data: data.view("<f4").astype(np.float32)),
    "F16": (2, lambda data: data.view("<f2").astype(np.float32)),
    "BF16": (2, _decode_bf16),
    "F8_E4M3": (1, lambda data: E4M3[data]),
    "F8_E5M2": (1, lambda data: _E5M2[data]),
}


def _open_safetensors(path: Path) -> dict[str, SourceTensor]:
    """Tensors of a safetensors file, memory-mapped; each is checked to be within the file.

    Format: the header's size (u64), the header as JSON, {name: {dtype, shape, data_offsets}}, and
    the data, to which the offsets refer.
    """
    _expect_data(path)
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
    if dtype not in _DECODERS and dtype not in _INTEGERS:
        return SourceTensor(shape, None)
    integers = np.dtype(_INTEGERS.get(dtype, "u1"))
    element_size, decode = _DECODERS.get(dtype, (integers.itemsize, None))
    if end - begin != prod(shape) * element_size:
        raise ValueError(f"tensor {name} is not as large as its shape and dtype say")
    if decode is not None:
        return SourceTensor(shape, lambda: decode(data[begin:end]).reshape(shape))

    def read_bytes() -> Bytes:
        return data[begin:end].reshape(shape)

    def read_integers() -> Integers:
        # A copy, as the header may be of any length.
        values: Integers = data[begin:end].copy().view(integers).reshape(shape)
        return values

    return SourceTensor(shape, None, read_bytes if dtype == "U8" else None, read_integers)


def _open_torch(path: Path) -> dict[str, SourceTensor]:
    """Tensors of a PyTorch file; weights_only prevents its pickle from running code."""
    _expect_data(path)
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
        shape = tuple(tensor.shape)
        if not tensor.is_floating_point():
            return SourceTensor(shape, None, read_integers=tensor.detach().numpy)
        return SourceTensor(shape, lambda: tensor.detach().float().numpy())

    for key in ("state_dict", "model", "module"):  # as frameworks of training store them
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if isinstance(state, Mapping):
        return {name: source(name, tensor) for name, tensor in state.items()}
    raise ValueError(f"{path}: expected tensors by name, found a {type(state).__name__}")
