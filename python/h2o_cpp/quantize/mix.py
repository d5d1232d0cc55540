"""The type of each tensor: as llama.cpp chooses for the file type of the same name.

Most tensors have one type. The K mixes ("_M", "_S") spend more bits on the tensors and layers
where errors cost most.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

Shape = tuple[int, ...]

_Q2_K = GGMLQuantizationType.Q2_K
_Q3_K = GGMLQuantizationType.Q3_K
_IQ4_NL = GGMLQuantizationType.IQ4_NL
_IQ4_XS = GGMLQuantizationType.IQ4_XS
_Q4_K = GGMLQuantizationType.Q4_K
_Q5_K = GGMLQuantizationType.Q5_K
_Q6_K = GGMLQuantizationType.Q6_K
_Q8_0 = GGMLQuantizationType.Q8_0


class Mix(NamedTuple):
    """A file type by its name in llama.cpp, and the type of most tensors."""

    name: str
    type: GGMLQuantizationType

    @property
    def file_type(self) -> LlamaFileType:
        """general.file_type."""
        return LlamaFileType[f"MOSTLY_{self.name}"]


_MOST = {
    "Q8_0": _Q8_0,
    "Q6_K": _Q6_K,
    "Q5_K_M": _Q5_K,
    "Q5_1": GGMLQuantizationType.Q5_1,
    "Q5_0": GGMLQuantizationType.Q5_0,
    "Q4_K_M": _Q4_K,
    "Q4_K_S": _Q4_K,
    "Q4_1": GGMLQuantizationType.Q4_1,
    "Q4_0": GGMLQuantizationType.Q4_0,
    "IQ4_NL": _IQ4_NL,
    "IQ4_XS": _IQ4_XS,
    "Q3_K_L": _Q3_K,
    "Q3_K_M": _Q3_K,
    "Q3_K_S": _Q3_K,
    "Q2_K": _Q2_K,
}
MIXES = {name: Mix(name, type) for name, type in _MOST.items()}

# Matrices that are not quantized: small ones and lookup tables.
_KEPT = (
    *("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight"),
    *("ssm_conv1d.weight", "shortconv.conv.weight"),
)

_VALUES = ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")

# For rows that are not whole blocks.
_FALLBACKS = {
    _Q2_K: _IQ4_NL,
    _Q3_K: _IQ4_NL,
    _IQ4_XS: _IQ4_NL,
    _Q4_K: GGMLQuantizationType.Q5_0,
    _Q5_K: GGMLQuantizationType.Q5_1,
    _Q6_K: _Q8_0,
}


@dataclass(frozen=True)
class Model:
    """Properties of the model that the choice depends on."""

    n_layers: int
    n_experts: int
    is_70b: bool
    group: int = 1  # query heads per KV head

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> "Model":
        """Reads it from a file's metadata; a missing number is 0."""
        architecture = metadata.get("general.architecture")

        def number(key: str) -> int:
            value = metadata.get(f"{architecture}.{key}")
            return value if isinstance(value, int) else 0

        n_layers, n_heads = number("block_count"), number("attention.head_count")
        n_kv_heads = number("attention.head_count_kv") or n_heads
        return Model(
            n_layers,
            number("expert_count"),
            # Eight query heads share a KV head, so attn_v is small.
            is_70b=architecture in ("llama", "qwen2") and n_layers == 80 and n_kv_heads != n_heads,
            group=n_heads // n_kv_heads if n_kv_heads else 1,
        )


def choose_types(
    mix: Mix, model: Model, shapes: Mapping[str, Shape], has_imatrix: bool = False
) -> dict[str, GGMLQuantizationType]:
    """The type of each tensor to quantize; other tensors keep theirs.

    `shapes`: by name, in numpy's order, rows before columns.
    """
    names = sorted(
        (name for name, shape in shapes.items() if _is_quantized(name, shape)), key=_layer_and_name
    )
    values = [name for name in names if name.endswith(_VALUES)]
    downs = [name for name in names if "ffn_down" in name]
    types = {}
    for name in names:
        if name == "output.weight" or (
            name == "token_embd.weight" and "output.weight" not in shapes
        ):
            type = _Q8_0 if mix.type is _Q8_0 or not _fits(mix.type, shapes[name]) else _Q6_K
        elif name in values:
            type = _value_type(mix, model, values.index(name), len(values))
        elif "ffn_down" in name:
            layer = _layer_and_name(name)[0] if model.n_experts > 1 else downs.index(name)
            type = _down_type(mix, layer, model.n_layers, has_imatrix)
        elif name.endswith("attn_k.weight") and model.n_experts == 8:
            type = _Q8_0
        elif name.endswith("attn_output.weight"):
            type = _attn_output_type(mix, model)
        else:
            type = mix.type
        types[name] = _fitting(type, shapes[name])
    return types


def _is_quantized(name: str, shape: Shape) -> bool:
    n_dims = len(shape) - next((i for i, n in enumerate(shape) if n != 1), len(shape))
    return n_dims >= 2 and name.endswith("weight") and not name.endswith(_KEPT)


def _layer_and_name(name: str) -> tuple[int, str]:
    """llama.cpp's order: by layer, after tensors outside the layers."""
    match name.split("."):
        case ["blk", layer, *_] if layer.isdecimal():
            return int(layer), name
    return -1, name


def _has_more_bits(i: int, n: int) -> bool:
    """The first and last eighth of the layers, and every third in between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _value_type(mix: Mix, model: Model, i: int, n: int) -> GGMLQuantizationType:
    if model.n_experts == 8:
        return _Q8_0
    match mix.name:
        case "Q4_K_M" | "Q5_K_M" if _has_more_bits(i, n):
            return _Q6_K
        case "Q4_K_S" if i < 4:
            return _Q5_K
        case "IQ4_NL" | "IQ4_XS" if model.group >= 4:
            return _Q5_K
        case "Q3_K_L":
            return _Q5_K
        case "Q3_K_M":
            return _Q5_K if i < 2 or model.is_70b else _Q4_K
        case "Q2_K":
            return _Q4_K if model.group >= 4 else _Q3_K
    return _Q5_K if model.is_70b and mix.type in (_Q3_K, _Q4_K) else mix.type


def _attn_output_type(mix: Mix, model: Model) -> GGMLQuantizationType:
    if model.n_experts == 8:
        few = (_Q2_K, _Q3_K, _Q4_K, _IQ4_NL, _IQ4_XS)
        is_small = mix.type in few and mix.name != "Q3_K_L"
        return _Q5_K if is_small else mix.type
    return {"Q2_K": _Q3_K, "Q3_K_M": _Q4_K, "Q3_K_L": _Q5_K}.get(mix.name, mix.type)


def _down_type(mix: Mix, i: int, n: int, has_imatrix: bool) -> GGMLQuantizationType:
    match mix.name:
        case "Q2_K":
            return _Q3_K
        case "Q3_K_M":
            return _Q5_K if i < n // 16 else _Q4_K
        case "Q3_K_L":
            return _Q5_K
        case "IQ4_NL" | "IQ4_XS":
            return _Q5_K if i < n // 8 and not has_imatrix else mix.type
        case "Q4_K_M" | "Q5_K_M" if _has_more_bits(i, n):
            return _Q6_K
        case "Q4_K_S" if i < n // 8:
            return _Q5_K
    return mix.type


def _fits(type: GGMLQuantizationType, shape: Shape) -> bool:
    return shape[-1] % GGML_QUANT_SIZES[type][0] == 0


def _fitting(type: GGMLQuantizationType, shape: Shape) -> GGMLQuantizationType:
    for choice in (type, _FALLBACKS.get(type)):
        if choice is not None and _fits(choice, shape):
            return choice
    return GGMLQuantizationType.F16
