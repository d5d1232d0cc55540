"""The meaning of Qwen3.5's config.json: layers, positions, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from h2o_cpp.convert.conversion import FAMILIES
from support.needs import packages

CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "max_position_embeddings": 64,
    "vocab_size": 50,
}


def metadata(**config: object) -> dict[str, Any]:
    family = FAMILIES["Qwen3_5ForCausalLM"]
    return dict(family.metadata({**family.absent, **CONFIG, **config}))


def kinds(linear: str) -> list[str]:
    """ "llf" -> linear_attention twice, then full_attention"""
    return [{"l": "linear_attention", "f": "full_attention"}[kind] for kind in linear]


@pytest.mark.parametrize(
    ("config", "interval"),
    [
        ({}, 4),
        ({"layer_types": None, "full_attention_interval": 3}, 3),
        ({"full_attention_interval": 1}, 1),
        ({"layer_types": kinds("lllflllf")}, 4),
        ({"layer_types": kinds("llfllfll")}, 3),
        # layer_types has precedence, as in transformers.
        ({"layer_types": kinds("lflflflf"), "full_attention_interval": 4}, 2),
        ({"layer_types": kinds("llllllll")}, 9),
    ],
)
def test_interval_of_layers_with_attention(config: dict[str, Any], interval: int) -> None:
    found = metadata(**config)
    assert found["full_attention_interval"] == interval
    assert "attention.recurrent_layers" not in found


@pytest.mark.parametrize("linear", ["lllfllff", "flllflll", "lllfllll"])
def test_layers_without_an_interval_are_listed(linear: str) -> None:
    found = metadata(layer_types=kinds(linear), full_attention_interval=4)
    assert found["attention.recurrent_layers"] == [kind == "l" for kind in linear]
    assert "full_attention_interval" not in found


@packages("transformers")
def test_absent_keys_have_the_defaults_of_transformers() -> None:
    import transformers

    for model in ("Qwen3_5", "Qwen3_5Moe"):
        theirs = getattr(transformers, f"{model}TextConfig")()
        for key, value in FAMILIES[f"{model}ForCausalLM"].absent.items():
            assert getattr(theirs, key) == value, key
        rope = theirs.rope_parameters
        assert rope["partial_rotary_factor"] == 0.25
        assert metadata()["rope.dimension_count"] == 64
        assert metadata()["rope.freq_base"] == rope["rope_theta"]


def test_yarn() -> None:
    """Qwen's instructions for long texts say so."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    found = metadata(rope_parameters=rope | {"mrope_section": [11, 11, 10]})
    assert found["rope.scaling.type"] == "yarn"
    assert found["rope.scaling.factor"] == 4
    assert found["context_length"] == 256


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': the MLP does not use SiLU"),
        ({"attention_bias": True}, "attention_bias is True: the attention has biases"),
        ({"attn_output_gate": False}, "attn_output_gate is False: the output of attention"),
        (
            {"linear_value_head_dim": 64},
            "linear_value_head_dim is 64: the heads of V are not as large as those of K (128)",
        ),
        (
            {"linear_num_value_heads": 24},
            "linear_num_value_heads is 24: they cannot share 16 heads of K evenly",
        ),
        ({"linear_num_value_heads": 8}, "linear_num_value_heads is 8: they cannot share 16"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim must be an integer from 1"),
        ({"full_attention_interval": 0}, "full_attention_interval must be an integer from 1"),
        ({"layer_types": kinds("llf")}, "layer_types must name one of linear_attention, full_"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types must name one of linear_"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type is 'llama3': only linear, "),
        ({"rope_parameters": {"mrope_section": 3}}, "mrope_section must be a list of integers"),
    ],
)
def test_what_a_file_cannot_express_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        metadata(**config)
