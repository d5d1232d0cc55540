"""Checkpoints that are published quantized: the file has the weights times their scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from h2o_cpp.convert import convert
from support.needs import packages
from support.opt_checkpoint import read_tensors, write_json
from support.random_models import Recipe, make_model, save_checkpoint
from support.refused_conversion import assert_refused

pytestmark = packages("torch", "transformers", "safetensors")

Array = NDArray[Any]
RECIPE = Recipe("Llama", 64, 4, 96, options={"num_key_value_heads": 2})
SIZE = 16  # columns of a group
MATRICES = {"self_attn.q_proj": "attn_q", "mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down"}


def words(numbers: Array, bits: int, order: list[int] | None = None) -> Array:
    """Numbers of a few bits in the last dimension, packed in words, the first one lowest; 3 bits
    continue in the next word.
    """
    if bits == 3:
        each = numbers[..., None] >> np.arange(3) & 1
        stream = each.astype(np.uint8).reshape(*numbers.shape[:-1], -1)
        return np.packbits(stream, axis=-1, bitorder="little").view("u4")
    n = 32 // bits
    parts = numbers.astype(np.uint32).reshape(*numbers.shape[:-1], -1, n)
    if order is not None:
        parts = parts[..., order]
    packed: Array = (parts << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return packed


def fp8(random: np.random.Generator, shape: tuple[int, int], scales: tuple[int, ...]) -> Any:
    import torch

    weight = torch.tensor(random.normal(size=shape)).to(torch.float8_e4m3fn)
    scale = random.uniform(0.1, 1, scales).astype(np.float32)
    blocks = scale.reshape(scales if len(scales) == 2 else (*scales, 1) if scales else (1, 1))
    steps = [-(-shape[i] // blocks.shape[i]) for i in range(2)]
    factors = blocks.repeat(steps[0], 0).repeat(steps[1], 1)[: shape[0], : shape[1]]
    return weight, torch.tensor(scale), weight.float().numpy() * factors


def fp8_blocks(random: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Any], Array]:
    sizes = (-(-shape[0] // 32), -(-shape[1] // 32))
    weight, scale, values = fp8(random, shape, sizes)
    return {".weight": weight, ".weight_scale_inv": scale}, values


def fp8_tensor(random: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Any], Array]:
    weight, scale, values = fp8(random, shape, ())
    return {
        ".weight": weight,
        ".weight_scale_inv": scale,
        ".activation_scale": scale.clone(),
    }, values


def fp8_rows(random: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Any], Array]:
    weight, scale, values = fp8(random, shape, (shape[0], 1))
    return {".weight": weight, ".weight_scale": scale}, values


def int8_rows(random: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Any], Array]:
    q = random.integers(-128, 128, shape, np.int8)
    scale = random.uniform(0.01, 0.1, (shape[0], 1)).astype("f4")
    return {".weight": q, ".weight_scale": scale}, q * scale


def packed(random: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Any], Array]:
    q = random.integers(0, 16, shape)
    scale = random.uniform(0.01, 0.1, (shape[0], shape[1] // SIZE)).astype("f4")
    parts = {".weight_packed": words(q, 4).view("i4"), ".weight_scale": scale}
    parts[".weight_shape"] = np.array(shape, "i8")
    return parts, (q - 8) * scale.repeat(SIZE, 1)


def packed_with_zeros(
    random: np.random.Generator, shape: tuple[int, int]
) -> tuple[dict[str, Any], Array]:
    """With reordered columns too."""
    parts, values = packed(random, shape)
    scale = parts[".weight_scale"]
    zero = random.integers(0, 16, scale.shape)
    group = random.permutation(np.arange(shape[1]) // SIZE).astype("i4")
    parts[".weight_zero_point"] = words(zero.T, 4).T.view("i4").copy()
    parts[".weight_g_idx"] = group
    q = values / scale.repeat(SIZE, 1) + 8
    return parts, (q.round() - zero[:, group]) * scale[:, group]


def gptq(
    random: np.random.Generator, shape: tuple[int, int], bits: int = 4
) -> tuple[dict[str, Any], Array]:
    n_out, n_in = shape
    n = 1 << bits
    q, zero = random.integers(0, n, shape), random.integers(0, n, (n_in // SIZE, n_out))
    scale = random.uniform(0.01, 0.1, zero.shape).astype("f2")
    group = random.permutation(np.arange(n_in) // SIZE).astype("i4")
    parts = {".qweight": words(q, bits).T.view("i4").copy(), ".scales": scale, ".g_idx": group}
    parts[".qzeros"] = words((zero - 1) % n, bits).view("i4")
    return parts, ((q.T - zero[group]) * scale[group].astype("f4")).T


def gptq3(random: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Any], Array]:
    return gptq(random, shape, 3)


def awq(random: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Any], Array]:
    n_out, n_in = shape
    q, zero = random.integers(0, 16, (n_in, n_out)), random.integers(0, 16, (n_in // SIZE, n_out))
    scale = random.uniform(0.01, 0.1, zero.shape).astype("f2")
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # as autoawq packs them
    parts = {".qweight": words(q, 4, order).view("i4"), ".scales": scale}
    parts[".qzeros"] = words(zero, 4, order).view("i4")
    return parts, ((q - zero.repeat(SIZE, 0)) * scale.repeat(SIZE, 0).astype("f4")).T


def bitsandbytes(
    random: np.random.Generator, shape: tuple[int, int]
) -> tuple[dict[str, Any], Array]:
    q = random.integers(-127, 128, shape, np.int8)
    largest = random.uniform(0.5, 2, shape[0]).astype("f4")
    return {".weight": q, ".SCB": largest}, q * (largest[:, None] / np.float32(127))


# Half of the numbers of E2M1; the other half has signs.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], "f4")


def fp4(random: np.random.Generator, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Numbers, and the bytes of pairs of them, the first one in the low bits."""
    q = random.integers(0, 16, shape, np.uint8)
    return np.where(q > 7, -FP4[q % 8], FP4[q % 8]), q[:, ::2] | q[:, 1::2] << 4


def nvfp4(
    random: np.random.Generator, shape: tuple[int, int], *, divides: bool
) -> tuple[dict[str, Any], Array]:
    import torch

    numbers, weight = fp4(random, shape)
    scale = torch.tensor(random.uniform(0.5, 2, (shape[0], shape[1] // 16)))
    scale = scale.to(torch.float8_e4m3fn)
    values = numbers * scale.float().numpy().repeat(16, 1)
    if divides:
        of_all = {".weight_packed": weight, ".weight_global_scale": np.array([64], "f4")}
        of_all[".input_global_scale"] = np.array([3], "f4")
        return {".weight_scale": scale, **of_all}, values / 64
    of_all = {".weight": weight, ".weight_scale_2": np.array(1 / 64, "f4")}
    of_all[".input_scale"] = np.array(3, "f4")
    return {".weight_scale": scale, **of_all}, values / 64


def mxfp4(
    random: np.random.Generator, shape: tuple[int, int], *, mlx: bool
) -> tuple[dict[str, Any], Array]:
    numbers, weight = fp4(random, shape)
    scale = random.integers(120, 130, (shape[0], shape[1] // 32), np.uint8)
    values = numbers * np.exp2(scale.astype("f4") - 127).repeat(32, 1)
    if mlx:
        return {".weight": weight.view("u4"), ".scales": scale}, values
    return {".weight_packed": weight, ".weight_scale": scale}, values


def bitsandbytes_4bit(
    random: np.random.Generator, shape: tuple[int, int], *, nested: bool
) -> tuple[dict[str, Any], Array]:
    """Blocks of 64 numbers, the first of a pair in the high bits."""
    q = random.integers(0, 16, shape, np.uint8)
    table = np.sort(random.uniform(-1, 1, 16)).astype("f4")
    weight = (q.reshape(-1)[::2] << 4 | q.reshape(-1)[1::2]).reshape(-1, 1)
    n_blocks = -(-q.size // 64)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": shape}
    parts = {".weight": weight, ".weight.quant_map": table}
    if nested:
        codes, largest = random.integers(0, 256, n_blocks, np.uint8), np.array([2, 3], "f4")
        of_codes = np.linspace(-1, 1, 256, dtype="f4")
        state |= {"nested_blocksize": 50, "nested_offset": 0.25}
        factors = of_codes[codes] * largest.repeat(50)[:n_blocks] + np.float32(0.25)
        parts |= {".weight.absmax": codes, ".weight.nested_absmax": largest}
        parts[".weight.nested_quant_map"] = of_codes
    else:
        factors = random.uniform(0.5, 2, n_blocks).astype("f4")
        parts[".weight.absmax"] = factors
    text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    parts[".weight.quant_state.bitsandbytes__nf4"] = text
    return parts, table[q] * factors.repeat(64)[: q.size].reshape(shape)


def mlx(random: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Any], Array]:
    q = random.integers(0, 16, shape)
    groups = (shape[0], shape[1] // SIZE)
    scale, bias = (random.uniform(-0.1, 0.1, groups).astype("f2") for _ in range(2))
    values = q * scale.astype("f4").repeat(SIZE, 1) + bias.astype("f4").repeat(SIZE, 1)
    return {".weight": words(q, 4), ".scales": scale, ".biases": bias}, values


_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
METHODS: dict[str, tuple[Callable[..., tuple[dict[str, Any], Array]], dict[str, Any]]] = {
    "fp8, blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp8, tensors": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8, rows": (fp8_rows, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "int8": (int8_rows, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "packed": (
        packed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": _WEIGHTS}},
        },
    ),
    "packed, zeros": (
        packed_with_zeros,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {"weights": {**_WEIGHTS, "symmetric": False, "actorder": "group"}}
            },
        },
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4}),
    "gptq, 3 bits": (gptq3, {"quant_method": "gptq", "bits": 3}),
    "nvfp4, divided": (
        partial(nvfp4, divides=True),
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ),
    "nvfp4, multiplied": (
        partial(nvfp4, divides=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "mxfp4": (
        partial(mxfp4, mlx=False),
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    ),
    "mxfp4 of MLX": (partial(mxfp4, mlx=True), {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "bitsandbytes": (bitsandbytes, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "bitsandbytes, 4 bits": (
        partial(bitsandbytes_4bit, nested=False),
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "bitsandbytes, nested": (
        partial(bitsandbytes_4bit, nested=True),
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "mlx": (mlx, {"group_size": SIZE, "bits": 4}),
}


def make_checkpoint(path: Path, quantization: dict[str, Any]) -> dict[str, Any]:
    from safetensors.torch import load_file

    save_checkpoint(make_model(RECIPE, 1), path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    write_json(path / "config.json", config | {"quantization_config": quantization})
    return dict(load_file(path / "model.safetensors"))


@pytest.mark.parametrize("in_torch", [False, True], ids=["safetensors", "torch"])
@pytest.mark.parametrize("method", METHODS)
def test_weights_are_dequantized(tmp_path: Path, method: str, in_torch: bool) -> None:
    import torch
    from safetensors.torch import save_file

    quantize, quantization = METHODS[method]
    weights = make_checkpoint(tmp_path, quantization)
    random = np.random.default_rng(1)
    expected = {}
    for i in range(2):
        for hf, gguf in MATRICES.items():
            name = f"model.layers.{i}.{hf}"
            shape = tuple(weights.pop(f"{name}.weight").shape)
            parts, expected[f"blk.{i}.{gguf}.weight"] = quantize(random, shape)
            for suffix, part in parts.items():
                weights[name + suffix] = torch.as_tensor(part)
    if in_torch:
        (tmp_path / "model.safetensors").unlink()
        torch.save(weights, tmp_path / "pytorch_model.bin")
    else:
        whole = {name: w.contiguous() for name, w in weights.items()}
        save_file(whole, tmp_path / "model.safetensors")
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    tensors = read_tensors(tmp_path / "model.gguf")
    for name, values in expected.items():
        found = tensors[name][1].reshape(values.shape)
        if name.endswith("attn_q.weight"):  # Llama's files rotate pairs
            head = values.shape[0] // 4
            values = values.reshape(4, 2, head // 2, -1).swapaxes(1, 2).reshape(values.shape)
        np.testing.assert_allclose(found, values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 5}, "GPTQ in 5 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ of version 'gemv'"),
        ({"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized"}, "mxfp6"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "by modelopt; take the original"),
        ({"quant_method": "quip"}, "by quip; take the original checkpoint, or a GGUF file of it"),
        ({"quant_method": "fp8"}, "by fp8, but the checkpoint has no scales"),
        ({"group_size": 32, "bits": 4, "mode": "mxfp8"}, "MLX in mxfp8"),
    ],
)
def test_others_are_refused(tmp_path: Path, quantization: dict[str, Any], message: str) -> None:
    make_checkpoint(tmp_path, quantization)
    assert_refused(tmp_path, message)


def test_quantization_of_model_optimizer_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {})
    write_json(tmp_path / "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}})
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    write_json(tmp_path / "config.json", config)
    assert_refused(tmp_path, "by modelopt, but the checkpoint has no scales")
