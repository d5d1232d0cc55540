"""The meaning of config.json if it lacks keys or has unusual ones, as in transformers."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_cpp.convert.conversion import FAMILIES
from support.needs import packages

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 50,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 8},
    "Qwen3Moe": EXPERTS,
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8},
    "Glm4Moe": ROUTED,
    "SolarOpen": ROUTED,
    "MiniMaxM2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ExaoneMoe": EXPERTS,
    "Phi3": {"pad_token_id": 0},
    "SmolLM3": {"pad_token_id": 0},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8},
    "Gemma3": {"head_dim": 8},
    "Mpt": {},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}


def metadata(model: str, **config: object) -> dict[str, Any]:
    """The metadata from a config.json of this family, without the keys of SIZES."""
    family = FAMILIES[f"{model}ForCausalLM"]
    return dict(family.metadata({**family.absent, **SIZES, **CONFIGS[model], **config}))


def slides(model: str, **config: object) -> list[bool]:
    """Which layers have a window."""
    found = metadata(model, **config)
    if "attention.sliding_window" not in found:
        return [False] * SIZES["num_hidden_layers"]
    usual = {"ExaoneMoe": 4, "Gemma2": 2, "Gemma3": 6, "GptOss": 2}.get(model)
    every = [usual is None or (i + 1) % usual != 0 for i in range(SIZES["num_hidden_layers"])]
    return list(found.get("attention.sliding_window_pattern", every))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Mistral", {"attention.sliding_window": 4096}),
        ("Mixtral", {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-5}),
        ("Olmoe", {"attention.layer_norm_rms_epsilon": 1e-5}),
        (
            "Ernie4_5_Moe",
            {
                "rope.freq_base": 500000.0,
                "leading_dense_block_count": 1,
                "expert_shared_count": 2,
                "expert_shared_feed_forward_length": 16,
            },
        ),
        (
            "Glm4Moe",
            {
                "rope.dimension_count": 4,
                "leading_dense_block_count": 1,
                "expert_shared_count": 1,
                "expert_weights_norm": True,
            },
        ),
        ("SolarOpen", {"rope.freq_base": 1e6, "rope.dimension_count": 128}),
        ("MiniMaxM2", {"rope.freq_base": 5e6, "attention.key_length": 128}),
        (
            "ExaoneMoe",
            {
                "attention.sliding_window": 4096,
                "leading_dense_block_count": 1,
                "expert_weights_norm": True,
                "expert_weights_scale": 2.5,
            },
        ),
        ("Phi3", {"attention.layer_norm_rms_epsilon": 1e-5}),
        ("SmolLM3", {"rope.freq_base": 2e6}),
        ("Gemma2", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
        ("Gemma3", {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}),
        (
            "GptOss",
            {
                "attention.sliding_window": 128,
                "rope.freq_base": 150000.0,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 32.0,
                "rope.scaling.original_context_length": 4096,
            },
        ),
    ],
)
def test_absent_keys_have_the_defaults_of_transformers(
    model: str, expected: dict[str, object]
) -> None:
    assert expected.items() <= metadata(model).items()


def test_null_is_not_absent() -> None:
    assert not any("sliding_window" in key for key in metadata("Mistral", sliding_window=None))
    without = metadata("Gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    caps = [value for key, value in without.items() if "softcapping" in key]
    assert caps == [0, 0]  # without them, readers assume 50 and 30


def test_null_is_false_or_an_empty_list() -> None:
    null = {"attention_bias": None, "mlp_bias": None, "mlp_only_layers": None}
    assert metadata("Qwen2Moe", **null) == metadata("Qwen2Moe")
    with pytest.raises(ValueError, match="decoder_sparse_step is None: some layers have no exp"):
        metadata("Qwen2Moe", decoder_sparse_step=None)


@pytest.mark.parametrize(
    ("model", "config", "layers"),
    [
        ("Qwen2Moe", WINDOW, [0, 2]),
        ("Qwen2Moe", WINDOW | {"use_sliding_window": False}, []),
        ("Qwen3Moe", WINDOW, list(range(8))),
        ("Qwen3Moe", WINDOW | {"use_sliding_window": False}, []),
        ("SmolLM3", WINDOW, [3, 7]),
        ("Gemma3", {"sliding_window": 5}, [0, 1, 2, 3, 4, 6, 7]),
        ("ExaoneMoe", {"sliding_window": 5, "sliding_window_pattern": "LLG"}, [0, 1, 3, 4, 6, 7]),
        ("ExaoneMoe", {"sliding_window": 5, "sliding_window_pattern": None}, [0, 1, 2, 4, 5, 6]),
        ("Gemma3", {"sliding_window": 5, "sliding_window_pattern": 3}, [0, 1, 3, 4, 6, 7]),
    ],
)
def test_layers_with_a_window(model: str, config: dict[str, Any], layers: list[int]) -> None:
    assert slides(model, **config) == [i in layers for i in range(SIZES["num_hidden_layers"])]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("LGLLG", "must be a number or a text like \"LLLG\", found 'LGLLG'"),
        ("", "must be a number or a text"),
        ([1, 0], r"must be an integer from 1 to 2\^31 - 1, found \[1, 0\]"),
    ],
)
def test_other_patterns_of_windows_are_rejected(pattern: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"sliding_window_pattern {message}"):
        metadata("ExaoneMoe", sliding_window=5, sliding_window_pattern=pattern)


@packages("torch", "transformers")
@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("Qwen2Moe", WINDOW),
        ("ExaoneMoe", {}),
        ("ExaoneMoe", {"sliding_window": 5, "sliding_window_pattern": 3}),
        ("SmolLM3", WINDOW),
        ("Gemma3", {"sliding_window": 5, "sliding_window_pattern": 3}),
        ("Gemma3", {"sliding_window": 5}),
        ("GptOss", {}),
    ],
)
def test_layers_with_a_window_equal_transformers(model: str, config: dict[str, Any]) -> None:
    import transformers

    name = "Gemma3Text" if model == "Gemma3" else model
    theirs: Any = getattr(transformers, f"{name}Config")(**SIZES, **CONFIGS[model], **config)
    expected = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert slides(model, **config) == expected


def test_largest_slope_of_mpt() -> None:
    """transformers reads the key and ignores it; MPT's own code and llama.cpp use it."""
    assert metadata("Mpt")["attention.max_alibi_bias"] == 8
    storywriter = metadata("Mpt", attn_config={"alibi_bias_max": 16})
    assert storywriter["attention.max_alibi_bias"] == 16


def test_gemma3_has_no_softcap_in_attention() -> None:
    found = metadata("Gemma3", attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    assert found == metadata("Gemma3", final_logit_softcapping=30.0)
    assert found["final_logit_softcapping"] == 30


def test_smollm3_rotates_by_fourth_layers() -> None:
    assert metadata("SmolLM3", no_rope_layer_interval=4) == metadata("SmolLM3")
    listed = metadata("SmolLM3", no_rope_layer_interval=2, no_rope_layers=[1, 1, 1, 0] * 2)
    assert listed == metadata("SmolLM3")
    with pytest.raises(ValueError, match="no_rope_layer_interval is 2: not every fourth"):
        metadata("SmolLM3", no_rope_layer_interval=2)
    with pytest.raises(ValueError, match="no_rope_layers is "):
        metadata("SmolLM3", no_rope_layers=[1, 0] * 4)


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_act": "gelu", "hidden_activation": None},  # google/gemma-7b-it
        {"hidden_act": "gelu"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
    ],
)
def test_gemma_computes_gelu_with_tanh(config: dict[str, Any]) -> None:
    assert metadata("Gemma", **config) == metadata("Gemma")


@pytest.mark.parametrize("config", [{"hidden_activation": "gelu"}, {"hidden_act": "silu"}])
def test_other_activations_of_gemma_are_rejected(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the MLP does not use GELU's form with tanh"):
        metadata("Gemma", **config)
