"""Shapes of real models for synthetic ones."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

# The special tokens of all synthetic models, with OPT's ids.
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
N_SPECIAL = len(SPECIAL)


def _llama(**sizes: Any) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    } | sizes


def _opt(hidden_size: int, num_hidden_layers: int, num_attention_heads: int = 32) -> Config:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "hidden_size": hidden_size,
        "word_embed_proj_dim": hidden_size,
        "ffn_dim": 4 * hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }


def _gpt_neox(hidden_size: int, **sizes: int) -> Config:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        # Exact or fast GELU in the published models; llama.cpp only supports this one.
        "hidden_act": "gelu_new",
        "use_parallel_residual": True,
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    } | sizes


# The parts of each model's config.json that determine the computation.
SHAPES: dict[str, Config] = {
    "TinyLlama-1.1B": _llama(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
    ),
    "LLaMA-7B": _llama(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        max_position_embeddings=2048,
    ),
    "Mistral-7B-v0.1": _llama(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=32768,
        sliding_window=4096,
    )
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    "LLaMA-3-8B": _llama(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    ),
    "OPT-125M": _opt(hidden_size=768, num_hidden_layers=12, num_attention_heads=12),
    "OPT-1.3B": _opt(hidden_size=2048, num_hidden_layers=24),
    "OPT-6.7B": _opt(hidden_size=4096, num_hidden_layers=32),
    "OPT-30B": _opt(hidden_size=7168, num_hidden_layers=48, num_attention_heads=56),
    "SmolLM2-135M": _llama(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
    "Pythia-410M": _gpt_neox(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, vocab_size=50304
    ),
    "GPT-NeoX-20B": _gpt_neox(
        hidden_size=6144, num_hidden_layers=44, num_attention_heads=64, vocab_size=50432
    ),
    # Without its biases, which take no time.
    "Qwen2.5-0.5B": _llama(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
    ),
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_size": 2048,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "hidden_size": 2880,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    # MQA in the sizes of TinyLlama.
    "MQA-22": _llama(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=1,
        vocab_size=32000,
        max_position_embeddings=16384,
    ),
    # MHA, with the largest possible cache.
    "MHA-12": _llama(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=12,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        max_position_embeddings=65536,
    ),
}


def config(shape: str, **changes: int) -> Config:
    """config.json of a shape, with some values overridden."""
    return {**SHAPES[shape], **changes}


def small(shape: str, **sizes: Any) -> Config:
    """A small shape with rows of whole K-quant blocks, so that types equal a large model's."""
    config = {**SHAPES[shape], "num_hidden_layers": 8, "vocab_size": 1000, **sizes}
    widths = {"hidden_size": 256, "intermediate_size": 512, "ffn_dim": 512}
    widths |= {"word_embed_proj_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    return config | {key: value for key, value in widths.items() if key in config}
