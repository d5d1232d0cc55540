"""The tensors of a GGUF file, their types, and reading and encoding their values."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

from h2o_cpp.convert.checkpoint import Bytes, SourceTensor, Values
from h2o_cpp.convert.config import Config, dimension
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.modules import Predictor, TensorSpec
from h2o_cpp.convert.other_names import other_specs

# Largest values of types with less range than float32; block scales are f16.
_LARGEST = {
    GGMLQuantizationType.F16: 65504.0,
    GGMLQuantizationType.BF16: 2.0**128 - 2.0**120,
    GGMLQuantizationType.Q8_0: 127 * 65504.0,
}

# Parts of the names of matrices that stay in F32.
_F32 = ("position_embd", "token_types", ".ffn_gate_inp", ".ssm_conv1d", ".shortconv.conv")


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write, before its values are read; `spec` has its names and shape."""

    spec: TensorSpec
    reads: Sequence[Callable[[], Values]]
    type: GGMLQuantizationType
    stored: Callable[[], Bytes] | None = None
    """Reads data to copy unchanged, instead of `reads`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape to write, in PyTorch order."""
        return self.spec.written_shape

    @property
    def nbytes(self) -> int:
        """The size of the tensor in the file, without padding."""
        block_size, type_size = GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // block_size * type_size

    def encode(self) -> npt.NDArray[Any]:
        """Read the values and return the `nbytes` to write.

        Raises ValueError for NaN, infinities and values beyond the range of the type.
        """
        if self.stored is not None:
            return self.stored()
        with np.errstate(over="ignore"):  # an overflow becomes an infinity
            return np.concatenate([self._encode(read()) for read in self.reads])

    def _encode(self, values: Values) -> npt.NDArray[Any]:
        if self.spec.rows is not None:
            values = values[..., slice(*self.spec.rows), :]
        if self.spec.transform is not None:
            values = self.spec.transform(values)
        largest = np.maximum(values.max(initial=0), -values.min(initial=0))  # NaN if there is any
        if not np.isfinite(largest):
            raise ValueError(f"tensor {self.spec.hf} has values that are NaN or infinite")
        if largest > _LARGEST.get(self.type, np.inf):
            wider = "f32" if self.type is GGMLQuantizationType.BF16 else "bf16 or f32"
            raise ValueError(
                f"tensor {self.spec.hf} has values of {largest:.8g}, beyond the range of"
                f" {self.type.name.lower()}; use {wider}"
            )
        return quantize(values, self.type)


def plan_tensors(
    family: Family,
    config: Config,
    tensors: Mapping[str, SourceTensor],
    weight_type: GGMLQuantizationType,
) -> list[PlannedTensor]:
    """The tensors to write, in file order.

    Raises ValueError if one is missing or has another shape than config.json implies, or if the
    checkpoint has a tensor that the family does not know.
    """
    names: Mapping[str, str]
    names = {name.removeprefix(family.base_prefix): name for name in tensors}
    plan = []
    used = set()
    if family.is_tied(config) and _has_own_head(family, names, tensors):
        config = {**config, family.tied_keys[0]: False}
    names = _with_tied_embedding(family, config, names)
    specs = [*family.tensors(config)]
    if predictor_of(family, config, names) is not None:
        specs += family.predictor_tensors(config)
    for spec in specs:
        if spec.sources()[0] not in names:
            others = (other for other in other_specs(spec) if other.sources()[0] in names)
            spec = next(others, spec)
        if spec.mxfp4_rows is not None and f"{spec.hf}_blocks" in names:
            parts = [f"{spec.hf}_blocks", f"{spec.hf}_scales"]
            used.update(parts)
            plan.append(_mxfp4_tensor(spec, [names.get(part, part) for part in parts], tensors))
            continue
        reads = []
        for hf in spec.sources():
            name = names.get(hf)
            if name is None:
                raise ValueError(f"tensor {hf} is missing from the checkpoint")
            used.add(hf)
            reads.append(_reader(name, tensors[name], spec))
        plan.append(PlannedTensor(spec, reads, _type(spec, weight_type)))
    for hf, name in names.items():
        if hf not in used and not family.ignores(config, hf):
            raise ValueError(f"tensor {name} is unknown in architecture `{family.architecture}`")
    for gguf, values in family.computed(config).items():
        plan.append(_computed(gguf, values))
    return plan


def predictor_of(family: Family, config: Config, names: Container[str]) -> Predictor | None:
    """The layer for multi-token prediction, if the checkpoint has one."""
    if (predictor := family.predictor) is None:
        return None
    name = predictor.projection.format(dimension(config, "num_hidden_layers")) + ".weight"
    return predictor if name in names or family.base_prefix + name in names else None


def _with_tied_embedding(
    family: Family, config: Config, names: Mapping[str, str]
) -> Mapping[str, str]:
    """The names, where a tied checkpoint may have only the head."""
    if family.head is None:
        return names
    embedding, head = (f"{module.hf}.weight" for module in (family.embeddings[0], family.head))
    if family.is_tied(config) and embedding not in names and head in names:
        return {**names, embedding: names[head]}
    return names


def _has_own_head(
    family: Family, names: Mapping[str, str], tensors: Mapping[str, SourceTensor]
) -> bool:
    """Whether there is a head other than the embedding; transformers 5 then does not tie them."""
    if family.head is None:
        return False
    modules = (family.embeddings[0], family.head)
    embedding, head = (tensors.get(names.get(f"{module.hf}.weight", "")) for module in modules)
    if embedding is None or head is None or embedding.read is None or head.read is None:
        return False
    return not np.array_equal(embedding.read(), head.read())


def _reader(name: str, source: SourceTensor, spec: TensorSpec) -> Callable[[], Values]:
    if source.read is None:
        raise ValueError(f"tensor {name} has an unsupported type, expected f64, f32, f16 or bf16")
    if source.shape != spec.shape:
        raise ValueError(
            f"tensor {name} has shape {list(source.shape)}, expected {list(spec.shape)}"
            " by config.json"
        )
    return source.read


def _computed(gguf: str, values: Values) -> PlannedTensor:
    spec = TensorSpec(gguf, hf="", shape=values.shape)
    return PlannedTensor(spec, [lambda: values], GGMLQuantizationType.F32)


def _type(spec: TensorSpec, weight_type: GGMLQuantizationType) -> GGMLQuantizationType:
    """Chooses as llama.cpp's converter: F32 but for matrices, F16 for rows of incomplete blocks."""
    is_matrix = len(spec.shape) > 1 and spec.gguf.endswith(".weight")
    if not is_matrix or any(part in spec.gguf for part in _F32):
        return GGMLQuantizationType.F32
    block_size, _ = GGML_QUANT_SIZES[weight_type]
    return GGMLQuantizationType.F16 if spec.written_shape[-1] % block_size else weight_type


def _mxfp4_tensor(
    spec: TensorSpec, names: Sequence[str], tensors: Mapping[str, SourceTensor]
) -> PlannedTensor:
    """Weights in MXFP4: bytes of two elements each, in order, and scales.

    Raises ValueError if one of the two is missing, or has another shape or type.
    """
    experts, columns, rows = spec.shape
    n_blocks, left = divmod(columns, 32)
    shapes = [(experts, rows, n_blocks, 16), (experts, rows, n_blocks)]
    reads = []
    for name, shape in zip(names, shapes, strict=True):
        source = tensors.get(name)
        if source is None:
            raise ValueError(f"tensor {name} is missing from the checkpoint")
        if source.read_bytes is None or source.shape != shape or left:
            raise ValueError(
                f"tensor {name} has another type or shape, expected u8 {list(shape)} by config.json"
            )
        reads.append(source.read_bytes)

    def stored() -> Bytes:
        pairs, scales = (read()[:, spec.mxfp4_rows] for read in reads)
        elements = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*scales.shape, 32)
        halves = elements[..., :16] | elements[..., 16:] << 4
        blocks: Bytes = np.concatenate([scales[..., None], halves], axis=-1)
        return blocks.reshape(-1)

    return PlannedTensor(spec, [], GGMLQuantizationType.MXFP4, stored)
