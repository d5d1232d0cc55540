"""gpt-oss: weights kept in MXFP4, attention sinks and scores, end-of-turn tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from h2o_cpp import Generator, KVCache, Policy, Rope
from h2o_cpp.convert import convert
from support.h2o_rules import ReferenceCache
from support.needs import packages
from support.opt_checkpoint import read_tensors, write_json, write_tokenizer_json
from support.random_models import (
    Recipe,
    make_model,
    products_error,
    random_tokens,
    reference_logits,
)
from support.vocabularies import byte_pairs, tokenizer_of

# Rows are whole MXFP4 blocks.
WIDE = Recipe(
    "GptOss",
    64,
    4,
    32,
    options={
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 6,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
)


def save_mxfp4(model: Any, path: Path) -> dict[str, NDArray[np.uint8]]:
    """Save in OpenAI's format, with random MXFP4 experts, and set the model's experts to them."""
    import torch
    from safetensors.numpy import save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = np.random.default_rng(1)
    packed: dict[str, NDArray[np.uint8]] = {}
    saved: dict[str, NDArray[Any]] = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            saved[name] = parameter.detach().numpy()
            continue
        experts, columns, rows = parameter.shape
        blocks = random.integers(256, size=(experts, rows, columns // 32, 16), dtype=np.uint8)
        scales = random.integers(122, 125, size=blocks.shape[:3], dtype=np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights = convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
        )
        with torch.no_grad():
            parameter.copy_(weights.reshape(parameter.shape))
    save_file(saved | packed, path / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    write_json(path / "config.json", config | {"architectures": ["GptOssForCausalLM"]})
    write_tokenizer_json(path)
    return packed


@packages("torch", "transformers", "safetensors")
def test_mxfp4_weights_are_copied_unchanged(tmp_path: Path) -> None:
    model = make_model(WIDE, 3)
    save_mxfp4(model, tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    tensors = read_tensors(tmp_path / "model.gguf")
    experts = model.model.layers[1].mlp.experts
    both = experts.gate_up_proj.detach().numpy()
    expected = {
        "gate": both[..., 0::2].swapaxes(1, 2),
        "up": both[..., 1::2].swapaxes(1, 2),
        "down": experts.down_proj.detach().numpy().swapaxes(1, 2),
    }
    for part, weights in expected.items():
        dtype, values = tensors[f"blk.1.ffn_{part}_exps.weight"]
        assert dtype is GGMLQuantizationType.MXFP4
        np.testing.assert_array_equal(values, weights)

    tokens = random_tokens(3)
    logits = reference_logits(model, tokens)
    with Generator(tmp_path / "model.gguf", kv_dtype="f32") as generator:
        error = np.abs(generator.logits(tokens) - logits).max()
    assert error < products_error(WIDE, 7) * np.abs(logits).max()  # x is rounded to 8 bits


@packages("torch", "transformers", "safetensors")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("scales are missing", r"tensor .*down_proj_scales is missing"),
        (
            "blocks have another shape",
            r"down_proj_blocks has another type or shape, expected u8 \[5, 64, 1",
        ),
    ],
)
def test_invalid_mxfp4_tensors_are_rejected(tmp_path: Path, change: str, message: str) -> None:
    from safetensors.numpy import load_file, save_file

    save_mxfp4(make_model(WIDE, 3), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    if "missing" in change:
        del weights[f"{name}_scales"]
    else:
        weights[f"{name}_blocks"] = weights[f"{name}_blocks"][:, :-1].copy()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path, tmp_path / "model.gguf")


@packages("torch", "transformers")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"swiglu_limit": 6.0}, "swiglu_limit is 6.0: other limits"),
        ({"attention_bias": False}, "attention_bias is False"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6, but there are 5 experts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the weights are quantized"),
    ],
)
def test_unsupported_config_is_rejected(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    model = make_model(WIDE, 1)
    model.save_pretrained(tmp_path)
    write_tokenizer_json(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    write_json(tmp_path / "config.json", settings | config)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path, tmp_path / "model.gguf")


@pytest.mark.parametrize("rope", [None, Rope(theta=100.0)])
@pytest.mark.parametrize("level", [-3.0, 0.0, 2.0, 6.0])
def test_attention_sinks_equal_reference(level: float, rope: Rope | None) -> None:
    """A sink logit is part of the softmax's denominator, but has no score.

    The higher it is, the less the tokens' scores grow; heavy hitters are selected by these scores.
    """
    random = np.random.default_rng(5)
    n_heads, n_kv_heads, head_dim = 4, 2, 16
    sinks = random.normal(level, 1, n_heads).astype(np.float32)
    policy = Policy.h2o(5, 4)
    cache = KVCache(
        n_heads, n_kv_heads, head_dim, policy, rope=rope, kv_dtype="f32", sink_logits=sinks
    )
    reference = ReferenceCache(n_heads, n_kv_heads, policy, rope, sinks=sinks.astype(np.float64))
    for n in (6, 1, 1, 7, 1, 1, 1, 12, 1):
        q = random.normal(size=(n, n_heads, head_dim)).astype(np.float32)
        k, v = random.normal(size=(2, n, n_kv_heads, head_dim)).astype(np.float32)
        out = cache.attend(q, k, v)
        expected = reference.attend(q.astype(float), k.astype(float), v.astype(float))
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=1e-6)
        for head, kept in enumerate(reference.heads):
            assert cache.positions(head).tolist() == [e.position for e in kept]
            scores = [e.score for e in kept]
            np.testing.assert_allclose(cache.scores(head), scores, rtol=2e-5, atol=1e-12)
    assert reference.margin > 1e-6


@pytest.mark.parametrize("sinks", [np.zeros(3, np.float32), np.zeros((4, 1), np.float32)])
def test_wrong_sink_logits_are_rejected(sinks: NDArray[np.float32]) -> None:
    with pytest.raises(ValueError, match=r"sink_logits has shape .*, expected \[4\]"):
        KVCache(4, 2, 8, Policy.window(4), sink_logits=sinks)
    with pytest.raises(ValueError, match="sink_logits"):
        KVCache(4, 2, 8, Policy.window(4), sink_logits=np.full(4, np.nan))


@pytest.mark.parametrize("names", [("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>")])
def test_end_token_does_not_end_a_turn_in_harmony(names: tuple[str, str]) -> None:
    """In harmony (and Solar Open's format), <|end|> ends a message; elsewhere it ends a turn."""
    harmony = [("<|end|>", 3), *((name, 3) for name in names)]
    metadata = byte_pairs(*harmony, pre="gpt-4o")
    tokens = metadata["tokenizer.ggml.tokens"]
    ends = tokenizer_of(metadata).end_tokens
    assert {tokens[i] for i in ends} >= {*names}
    assert tokens.index("<|end|>") not in ends
    others = byte_pairs(*harmony[:1], pre="gpt-2")
    assert others["tokenizer.ggml.tokens"].index("<|end|>") in tokenizer_of(others).end_tokens
