"""Weights of checkpoints that are published quantized, dequantized as the libraries do.

Each method keeps a weight in several tensors, such as weight and weight_scale_inv. They become one
tensor by the weight's name, whose values are computed when it is read.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from h2o_cpp.convert.checkpoint import read_optional_json
from h2o_cpp.convert.config import Config
from h2o_cpp.convert.quantized.compressed import compressed
from h2o_cpp.convert.quantized.fp4 import nvfp4
from h2o_cpp.convert.quantized.mlx import mlx
from h2o_cpp.convert.quantized.packed import awq, gptq
from h2o_cpp.convert.quantized.parts import Tensors, refused
from h2o_cpp.convert.quantized.scaled import bitsandbytes, scaled
from h2o_cpp.convert.quantized.table4 import bitsandbytes_4bit


def quantization_of(directory: Path, config: Config) -> Mapping[str, Any] | None:
    """The quantization that config.json describes; MLX calls it `quantization`, and ModelOpt has a
    file for it.
    """
    for key in ("quantization_config", "compression_config", "quantization"):
        if isinstance(found := config.get(key), dict):
            return found
    found = read_optional_json(directory / "hf_quant_config.json").get("quantization")
    return {"quant_method": "modelopt", **found} if isinstance(found, dict) else None


def dequantized(tensors: Tensors, quantization: Mapping[str, Any]) -> Tensors:
    """The tensors with quantized weights as floats.

    Raises ValueError, with what to take instead, for methods whose weights are not integers,
    floats or indices of a few bits times scales.
    """
    method = quantization.get("quant_method") or "MLX"
    found = _reader(method, quantization)(dict(tensors), quantization)
    if found.keys() == tensors.keys():
        raise ValueError(
            f"config.json: quantization_config: the weights are quantized by {method},"
            " but the checkpoint has no scales"
        )
    return found


def _reader(
    method: object, quantization: Mapping[str, Any]
) -> Callable[[Tensors, Mapping[str, Any]], Tensors]:
    match method:
        case "fp8" | "fbgemm_fp8":
            return scaled
        case "modelopt" if str(quantization.get("quant_algo")).upper() == "FP8":
            return scaled
        case "modelopt" if str(quantization.get("quant_algo")).upper() == "NVFP4":
            return nvfp4
        case "compressed-tensors":
            return compressed
        case "gptq":
            return gptq
        case "awq":
            return awq
        case "bitsandbytes" if quantization.get("load_in_8bit"):
            return bitsandbytes
        case "bitsandbytes":
            return bitsandbytes_4bit
        case "MLX" if "group_size" in quantization and "bits" in quantization:
            return mlx
    raise refused(method)
