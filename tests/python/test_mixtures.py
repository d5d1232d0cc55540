"""Mixtures of experts: logits do not depend on the batch, and invalid files are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType

from h2o_cpp import Generator
from h2o_cpp.convert import convert
from support.changed_gguf import changed
from support.converted_files import make_file
from support.needs import packages
from support.opt_checkpoint import read_tensors, write_json
from support.random_models import RECIPES, Recipe, make_model, random_tokens, save_checkpoint

U32, F32 = GGUFValueType.UINT32, GGUFValueType.FLOAT32

# Whole blocks of every type, a shared expert, and some experts that no token is routed to.
WIDE = Recipe(
    "Qwen2Moe",
    64,
    4,
    64,
    options={
        "num_key_value_heads": 2,
        "num_experts": 32,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
)


@packages("torch", "transformers")
@pytest.mark.parametrize("outtype", ["f32", "f16", "q8_0"])
def test_logits_do_not_depend_on_the_batch(tmp_path: Path, outtype: str) -> None:
    """Logits of a token are bit-identical, alone or in a batch of tokens that share experts."""
    path = make_file(make_model(WIDE, 5), tmp_path, outtype)
    tokens = random_tokens(5)
    logits = []
    for n_batch, threads in ((1, 1), (40, 1), (7, 2), (40, 3)):
        with Generator(path, n_batch=n_batch, threads=threads) as generator:
            logits.append(generator.logits(tokens))
    for other in logits[1:]:
        np.testing.assert_array_equal(other, logits[0])


_SHARED = {
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
}


@packages("torch", "transformers", "safetensors")
@pytest.mark.parametrize(
    ("recipe", "experts", "router", "shared"),
    [
        (WIDE, "mlp.experts.{}.{}_proj.weight", "mlp.gate.weight", _SHARED),
        (
            RECIPES["mixtral"],
            "block_sparse_moe.experts.{}.{}.weight",
            "block_sparse_moe.gate.weight",
            {},
        ),
    ],
)
def test_converted_tensor_names_and_types(
    tmp_path: Path, recipe: Recipe, experts: str, router: str, shared: dict[str, str]
) -> None:
    """llama.cpp's converter writes them so: 3-D expert tensors, routers in F32."""
    from safetensors.numpy import load_file

    path = make_file(make_model(recipe, 1), tmp_path, "f16")
    weights = load_file(tmp_path / "model.safetensors")
    tensors = read_tensors(path)
    n_experts = recipe.options.get("num_experts", 5)
    layer = "model.layers.1."
    mixtral = {"gate": "w1", "up": "w3", "down": "w2"}
    for part in ("gate", "up", "down"):
        dtype, values = tensors.pop(f"blk.1.ffn_{part}_exps.weight")
        hf = mixtral[part] if "block_sparse" in experts else part
        names = [layer + experts.format(i, hf) for i in range(n_experts)]
        assert dtype is GGMLQuantizationType.F16
        np.testing.assert_array_equal(values, np.stack([weights[n] for n in names]).astype("f2"))
    others = {"ffn_gate_inp.weight": router} | shared
    for gguf, hf in others.items():
        dtype, values = tensors.pop(f"blk.1.{gguf}")
        routes = gguf.startswith("ffn_gate_inp")
        assert dtype is (GGMLQuantizationType.F32 if routes else GGMLQuantizationType.F16)
        np.testing.assert_array_equal(values, weights[layer + hf].astype("f4" if routes else "f2"))
    assert not any(name.startswith("blk.1.ffn") and "norm" not in name for name in tensors)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2: some layers have no experts"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]: some layers have no experts"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok is 33, but there are 32 experts"),
        ({"num_experts": 33}, "missing|has shape"),
    ],
)
@packages("torch", "transformers")
def test_convert_rejects_config(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    save_checkpoint(make_model(WIDE, 1), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    write_json(tmp_path / "config.json", settings | config)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_used_count": (10, U32)}, "expert_used_count is 10, expected 1 to expert_count 9"),
        ({"expert_used_count": (0, U32)}, "expert_used_count is 0, expected 1 to"),
        ({"expert_gating_func": (4, U32)}, r"expert_gating_func is 4, supported: 1 \(softmax\), 2"),
        ({"expert_count": (8, U32)}, r"blk\.0\.ffn_gate_inp\.weight has shape \[9, 40\], expected"),
        ({"expert_feed_forward_length": (25, U32)}, r"ffn_gate_exps\.weight has shape \[216, 40\]"),
        ({"expert_count": (0, U32)}, "expert_used_count' is 4, which h2o does not support"),
        ({"expert_group_count": (2, U32)}, "expert_group_used_count"),
        (
            {"expert_group_count": (2, U32), "expert_group_used_count": (1, U32)},
            "expert_group_count is 2, expected a divisor of expert_count 9, at most 32",
        ),
        (
            {"expert_group_count": (3, U32), "expert_group_used_count": (1, U32)},
            "expert_group_used_count is 1 of 3 groups of 3 experts, expected groups with at least"
            " 4 experts",
        ),
        (
            {"expert_group_count": (3, U32), "expert_group_used_count": (4, U32)},
            "expert_group_used_count is 4 of 3 groups",
        ),
        ({"expert_shared_count": (1, U32)}, r"blk\.0\.ffn_gate_shexp\.weight is missing"),
        ({"expert_shared_count": (2**24, U32)}, r"expert_shared_count is \d+, expected 1 to"),
        ({"leading_dense_block_count": (1, U32)}, r"blk\.0\.ffn_up\.weight is missing"),
        ({"interleave_moe_layer_step": (2, U32)}, r"blk\.0\.ffn_up\.weight is missing"),
        ({"nextn_predict_layers": (2, U32)}, "block_count is 0, expected 1 to"),
        ({"expert_shared_feed_forward_length": (8, U32)}, r"ffn_gate_shexp\.weight is missing"),
    ],
)
def test_invalid_metadata_is_rejected(
    data: Path, tmp_path: Path, keys: dict[str, tuple[Any, GGUFValueType]], message: str
) -> None:
    keys = {f"qwen3moe.{key}": value for key, value in keys.items()}
    file = changed(data / "golden" / "qwen3moe.gguf", tmp_path / "m.gguf", keys, {})
    with pytest.raises(ValueError, match=message):
        Generator(file)


def test_expert_weights_scale(data: Path, tmp_path: Path) -> None:
    """A scale of 0 means no scale, like 1."""
    tokens = random_tokens(1)
    logits = {}
    for scale in (None, 0.0, 1.0, 1e-20):
        keys = {} if scale is None else {"qwen3moe.expert_weights_scale": (scale, F32)}
        file = changed(data / "golden" / "qwen3moe.gguf", tmp_path / "m.gguf", keys, {})
        with Generator(file) as generator:
            logits[scale] = generator.logits(tokens)
    for no_scale in (0.0, 1.0):  # GGUF files write 0 for no scale
        np.testing.assert_array_equal(logits[no_scale], logits[None])
    assert np.abs(logits[1e-20] - logits[None]).max() > 0.1


def fused(source: Path, target: Path) -> Path:
    """The file with gate and up of all experts in one tensor, as llama.cpp's converter writes."""
    tensors = {name: values for name, (_, values) in read_tensors(source).items()}
    both, without = {}, []
    for name, gate in tensors.items():
        if ".ffn_gate_exps." in name:
            up = name.replace("gate", "up")
            both[name.replace("gate", "gate_up")] = np.concatenate([gate, tensors[up]], axis=1)
            without += [name, up]
    assert both
    return changed(source, target, {}, both, without=without)


@packages("torch", "transformers")
@pytest.mark.parametrize("recipe", [WIDE, RECIPES["mixtral"], RECIPES["gpt_oss"]])
@pytest.mark.parametrize("n_batch", [1, 40])
def test_gate_and_up_in_one_tensor(
    tmp_path: Path, recipe: Recipe, n_batch: int, exact_device: str
) -> None:
    path = make_file(make_model(recipe, 5), tmp_path)
    logits = [
        Generator(file, n_batch=n_batch, threads=2, device=exact_device).logits(random_tokens(5))
        for file in (
            path,
            fused(path, tmp_path / "fused.gguf"),
        )
    ]
    np.testing.assert_array_equal(logits[1], logits[0])


@packages("torch", "transformers")
def test_factors_of_whole_matrices(tmp_path: Path) -> None:
    """NVFP4's `.scale`: the same bits as powers of two in the scales of blocks, which are E4M3."""
    path = make_file(make_model(WIDE, 5), tmp_path)
    random = np.random.default_rng(1)
    n = 32
    doublings = {"ffn_gate_exps": random.integers(0, 3, n), "attn_output": np.array([2])}
    plain: dict[str, Any] = {}
    scaled: dict[str, Any] = {}
    for name, (_, values) in read_tensors(path).items():
        part = name.split(".")[-2]
        if name.startswith("blk.0.") and part in doublings and values.shape[-1] % 64 == 0:
            shape = (*values.shape[:-1], values.shape[-1] // 64 * 36)
            data = random.integers(0, 256, shape, np.uint8)
            blocks = data.reshape(doublings[part].size, -1, 36).copy()
            blocks[..., :4] = random.integers(0x10, 0x28, blocks[..., :4].shape)
            scaled[name] = blocks.reshape(data.shape).copy()
            blocks[..., :4] += (8 * doublings[part]).astype(np.uint8)[:, None, None]
            plain[name] = blocks.reshape(data.shape)
            factors = (2.0 ** doublings[part]).astype(np.float32)
            scaled[name.replace(".weight", ".scale")] = factors
            scaled[name.replace(".weight", ".input_scale")] = factors
    assert len(scaled) >= 3
    for exact in (False, True):
        logits = []
        for tensors in (plain, scaled):
            file = changed(path, tmp_path / "changed.gguf", {}, tensors)
            with Generator(file, threads=2, exact=exact) as generator:
                logits.append(generator.logits(random_tokens(5)))
        np.testing.assert_array_equal(logits[1], logits[0])
