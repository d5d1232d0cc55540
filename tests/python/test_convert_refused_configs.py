"""Errors of the converter about config.json: each names the key."""

from pathlib import Path

import pytest

from support import rotary_checkpoint
from support.opt_checkpoint import CONFIG, make_checkpoint, write_json
from support.refused_conversion import assert_refused


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_layer_norm_before", False),  # opt-350m
        ("_remove_final_layer_norm", True),
        ("activation_function", "gelu"),  # Galactica
        ("enable_bias", False),
        ("layer_norm_elementwise_affine", False),
        ("word_embed_proj_dim", 32),
        ("num_attention_heads", 7),
        ("hidden_size", None),
        ("ffn_dim", -1),
        ("num_hidden_layers", "2"),
        ("vocab_size", True),
        ("bos_token_id", 12),
        ("architectures", ["CTRLLMHeadModel"]),
        ("architectures", None),
    ],
)
def test_unsupported_opt_config_is_rejected(
    checkpoint: Path, tmp_path: Path, key: str, value: object
) -> None:
    (checkpoint / "special_tokens_map.json").unlink()  # so that bos_token_id is read
    write_json(checkpoint / "config.json", CONFIG | {key: value})
    assert_refused(checkpoint, f"config.json: {key} ")
    assert_refused(checkpoint, repr(value))


@pytest.mark.parametrize(
    ("architecture", "needs"),
    [
        ("Mamba2ForCausalLM", "state-space"),
        ("JambaForCausalLM", "state-space"),
        ("KimiLinearForCausalLM", "linear attention"),
        ("GlmMoeDsaForCausalLM", "multi-head latent attention"),
        ("Gemma3nForConditionalGeneration", "several residual streams"),
        ("MiMoV2FlashForCausalLM", "values of another size than keys"),
        ("Step3p5ForCausalLM", "gates of attention by head"),
        ("AfmoeForCausalLM", "a tensor of gates of attention's outputs"),
        ("LlavaForConditionalGeneration", "an encoder of pictures"),
    ],
)
def test_unsupported_architecture_names_missing_feature(
    checkpoint: Path, architecture: str, needs: str
) -> None:
    write_json(checkpoint / "config.json", CONFIG | {"architectures": [architecture]})
    assert_refused(checkpoint, f"architectures is '{architecture}', which needs ")
    assert_refused(checkpoint, needs)


def rope(**parameters: object) -> dict[str, object]:
    return {"rope_parameters": parameters}


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu': the MLP does not use SiLU"),
        ("llama", {"num_attention_heads": 7}, "num_attention_heads is 7: "),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3: "),
        ("llama", {"head_dim": 15}, "head_dim is 15: "),
        ("llama", {"attention_bias": "yes"}, "attention_bias must be true or false"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ("llama", {"rope_theta": "1e4"}, "rope_theta must be a positive number"),
        ("llama", {"max_position_embeddings": None}, "max_position_embeddings must be"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", rope(rope_type="ntk", factor=2.0), "rope_type is 'ntk': "),
        ("llama", rope(rope_type="longrope"), "rope_type is 'longrope': "),
        ("llama", {"rope_scaling": {"type": "su"}}, "rope_type is 'su': "),
        ("llama", rope(rope_type="linear"), "factor must be a positive number, found None"),
        ("llama", rope(rope_type="yarn", factor=2, truncate=False), "truncate is False: "),
        (
            "llama",
            rope(rope_type="yarn", factor=2, mscale=-1.0, mscale_all_dim=1.0),
            "mscale must be a positive number",
        ),
        ("llama", rope(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5: "),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "differs between layers"),
        (
            "llama",
            rope(
                rope_type="llama3",
                factor=8,
                low_freq_factor=2,
                high_freq_factor=1,
                original_max_position_embeddings=8,
            ),
            "high_freq_factor 1.0 must be at least 2.0",
        ),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window must be true or false"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
            "sliding_window must be a",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"]},
            "layer_types must name one of full_attention, sliding_attention for each of 2 layers",
        ),
        ("qwen3", {"attention_bias": True}, "attention_bias is True: "),
        ("qwen2", {"is_causal": False}, "is_causal is False: "),
        (
            "llama",
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]},
            "no_rope_layers is [1, 0]: not every fourth layer is unrotated",
        ),
        (
            "llama",
            {"architectures": ["GraniteForCausalLM"], "mlp_bias": True},
            "mlp_bias is True: there are biases",
        ),
        (
            "llama",
            {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "silu"},
            "hidden_activation is 'silu': the MLP does not use GELU",
        ),
        (
            "llama",
            {
                "architectures": ["Gemma3ForCausalLM"],
                "hidden_activation": "gelu_pytorch_tanh",
                "layer_types": ["full_attention", "linear"],
            },
            "layer_types must name one of",
        ),
        (
            "llama",
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"type": "longrope", "long_factor": [1.0]},
            },
            "original_max_position_embeddings must be an integer",
        ),
        (
            "llama",
            {"architectures": ["Starcoder2ForCausalLM"], "hidden_act": "gelu"},
            "hidden_act is 'gelu': the MLP does not use GELU's form with tanh",
        ),
        (
            "llama",
            {"architectures": ["StableLmForCausalLM"], "qk_layernorm": True},
            "qk_layernorm is True: q and k are normalized",
        ),
        (
            "llama",
            {"architectures": ["CohereForCausalLM"], "use_qk_norm": True},
            "use_qk_norm is True: q and k are normalized",
        ),
        (
            "llama",
            {"architectures": ["ArceeForCausalLM"]},
            "hidden_act is 'silu': the MLP does not square ReLU",
        ),
        (
            "llama",
            {"architectures": ["NemotronForCausalLM"]},
            "hidden_act is 'silu': the MLP does not square ReLU",
        ),
        (
            "llama",
            {"architectures": ["PhiForCausalLM"], "qk_layernorm": True},
            "qk_layernorm is True: q and k are normalized",
        ),
        (
            "llama",
            {"architectures": ["GPTBigCodeForCausalLM"], "multi_query": False},
            "multi_query is False: each query head has its own KV head",
        ),
        (
            "llama",
            {"architectures": ["MPTForCausalLM"], "attn_config": {"softmax_scale": 6}},
            "softmax_scale is 6: attention is scaled differently",
        ),
        ("gptneox", {"hidden_act": "relu"}, "hidden_act is 'relu': the MLP does not use GELU"),
        ("gptneox", {"attention_bias": False}, "attention_bias is False: "),
        ("gptneox", {"tie_word_embeddings": True}, "tie_word_embeddings is True: "),
        ("gptneox", {"num_attention_heads": 7}, "num_attention_heads is 7: "),
        ("gptneox", {"rotary_pct": 0.1}, "partial_rotary_factor is 0.1: "),
        ("gptneox", {"rotary_pct": 1.5}, "partial_rotary_factor is 1.5: "),
        ("gptneox", {"rotary_pct": "all"}, "partial_rotary_factor must be a positive number"),
        ("gptneox", {"use_parallel_residual": 1}, "use_parallel_residual must be true or false"),
    ],
)
def test_unsupported_config_of_other_families_is_rejected(
    tmp_path: Path, architecture: str, config: dict[str, object], message: str
) -> None:
    rotary_checkpoint.make_checkpoint(tmp_path, architecture)
    write_json(tmp_path / "config.json", rotary_checkpoint.CONFIGS[architecture] | config)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff", "[" * 100_000])
def test_malformed_config_json_is_rejected(checkpoint: Path, tmp_path: Path, text: str) -> None:
    (checkpoint / "config.json").write_bytes(text.encode("latin-1"))
    assert_refused(checkpoint, "config.json")


@pytest.mark.parametrize("key", ["max_position_embeddings", "vocab_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [2**31, 2**63, 10**400])
def test_sizes_beyond_32_bits_are_rejected(checkpoint: Path, key: str, value: int) -> None:
    write_json(checkpoint / "config.json", CONFIG | {key: value})
    assert_refused(checkpoint, f"{key} must be an integer from 1 to 2^31 - 1, found {value}")
