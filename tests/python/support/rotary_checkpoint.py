"""Tiny random checkpoints of families with rotary positions, in HF's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.opt_checkpoint import (
    Arrays,
    read_metadata,
    write_json,
    write_safetensors,
    write_tokenizer_json,
)

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "vocab_size": 12,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
_RMS = {
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | _RMS | {"architectures": ["LlamaForCausalLM"], "rope_theta": 500000},
    "qwen2": _COMMON | _RMS | {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1000000.0},
    "qwen3": _COMMON | _RMS | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "gptneox": _COMMON
    | {
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.5,
        "rotary_emb_base": 20000,
    },
}

# Metadata keys without the architecture's prefix.
_COMMON_KEYS: dict[str, Any] = {
    "context_length": 32,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "vocab_size": 12,
}
_RMS_KEYS: dict[str, Any] = {
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
}
METADATA: dict[str, dict[str, Any]] = {
    "llama": _COMMON_KEYS | _RMS_KEYS | {"rope.dimension_count": 16, "rope.freq_base": 500000.0},
    "qwen2": _COMMON_KEYS | _RMS_KEYS | {"rope.dimension_count": 16, "rope.freq_base": 1000000.0},
    "qwen3": _COMMON_KEYS
    | _RMS_KEYS
    | {
        "rope.dimension_count": 32,
        "rope.freq_base": 10000.0,
        "attention.key_length": 32,
        "attention.value_length": 32,
    },
    "gptneox": _COMMON_KEYS
    | {
        "attention.head_count_kv": 4,
        "attention.layer_norm_epsilon": pytest.approx(1e-5),
        "use_parallel_residual": True,
        "rope.dimension_count": 8,
        "rope.freq_base": 20000.0,
        "h2o.activation": "gelu_erf",
    },
}


# Names from gguf.md, section 3, written independently: GGUF, HF, rows, columns. "B" in the third
# place: a bias with attention_bias; "M": one with mlp_bias.
_LLAMA = [
    ("attn_norm", "input_layernorm", "e", ""),
    ("attn_q", "self_attn.q_proj", "q", "e"),
    ("attn_k", "self_attn.k_proj", "k", "e"),
    ("attn_v", "self_attn.v_proj", "k", "e"),
    ("attn_q_norm", "self_attn.q_norm", "h", ""),
    ("attn_k_norm", "self_attn.k_norm", "h", ""),
    ("attn_output", "self_attn.o_proj", "e", "q"),
    ("ffn_norm", "post_attention_layernorm", "e", ""),
    ("ffn_gate", "mlp.gate_proj", "f", "e"),
    ("ffn_up", "mlp.up_proj", "f", "e"),
    ("ffn_down", "mlp.down_proj", "e", "f"),
]
_GPTNEOX = [
    ("attn_norm", "input_layernorm", "e", ""),
    ("attn_qkv", "attention.query_key_value", "3", "e"),
    ("attn_output", "attention.dense", "e", "e"),
    ("ffn_norm", "post_attention_layernorm", "e", ""),
    ("ffn_up", "mlp.dense_h_to_4h", "f", "e"),
    ("ffn_down", "mlp.dense_4h_to_h", "e", "f"),
]


def tensor_names(architecture: str, config: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """GGUF name -> HF name and shape of every tensor."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    kv = config.get("num_key_value_heads", heads) * head
    sizes = {"e": width, "f": config["intermediate_size"], "q": heads * head, "k": kv, "h": head}
    sizes["3"] = 3 * width
    neox = architecture == "gptneox"
    base = "gpt_neox." if neox else "model."
    vocab = [config["vocab_size"], width]
    names = {
        "token_embd.weight": (base + ("embed_in" if neox else "embed_tokens") + ".weight", vocab),
        "output_norm.weight": (
            base + ("final_layer_norm" if neox else "norm") + ".weight",
            [width],
        ),
    }
    if neox:
        names["output_norm.bias"] = ("gpt_neox.final_layer_norm.bias", [width])
    if not config.get("tie_word_embeddings"):
        names["output.weight"] = ("embed_out.weight" if neox else "lm_head.weight", vocab)
    for i in range(config["num_hidden_layers"]):
        for gguf, hf, rows, columns in _GPTNEOX if neox else _LLAMA:
            if gguf in ("attn_q_norm", "attn_k_norm") and architecture != "qwen3":
                continue
            shape = [sizes[name] for name in (rows, columns) if name]
            place = (f"blk.{i}.{gguf}", f"{base}layers.{i}.{hf}")
            names[f"{place[0]}.weight"] = (f"{place[1]}.weight", shape)
            if _has_bias(architecture, config, gguf):
                names[f"{place[0]}.bias"] = (f"{place[1]}.bias", shape[:1])
    return names


def _has_bias(architecture: str, config: dict[str, Any], gguf: str) -> bool:
    if architecture == "gptneox":
        return True
    if "norm" in gguf:
        return False
    if architecture == "qwen2":
        return gguf in ("attn_q", "attn_k", "attn_v")
    return bool(config.get("attention_bias" if gguf.startswith("attn") else "mlp_bias"))


def random_weights(architecture: str, config: dict[str, Any]) -> Arrays:
    """Weights by HF name."""
    rng = np.random.default_rng(0)
    return {
        hf: (rng.integers(-127, 128, shape) / 64).astype(np.float32)
        for hf, shape in tensor_names(architecture, config).values()
    }


def make_checkpoint(path: Path, architecture: str, **config: object) -> Arrays:
    """Write a random checkpoint with changes of its config; returns its weights by HF name."""
    path.mkdir(exist_ok=True)
    settings = CONFIGS[architecture] | config
    weights = random_weights(architecture, settings)
    write_json(path / "config.json", settings)
    write_safetensors(path / "model.safetensors", weights)
    write_tokenizer_json(path)
    return weights


def expected_tensors(architecture: str, config: dict[str, Any], weights: Arrays) -> Arrays:
    """The expected tensors by GGUF name; rows are permuted one by one."""
    tensors: Arrays = {}
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for gguf, (hf, _) in tensor_names(architecture, config).items():
        values = weights[hf]
        order = list(range(len(values)))
        module = gguf.split(".")[-2]
        if architecture == "llama" and module in ("attn_q", "attn_k"):
            order = [_half_row(row, head) for row in order]
        if module == "attn_qkv":
            order = [_fused_row(row, head, len(order) // 3) for row in order]
        tensors[gguf] = values[order]
    return tensors


def _half_row(row: int, head: int) -> int:
    """The row in HF of dimension `row` of ggml's adjacent pairs."""
    start, dimension = row - row % head, row % head
    return start + dimension // 2 + dimension % 2 * (head // 2)


def _fused_row(row: int, head: int, width: int) -> int:
    """The row in HF, ordered by head, of row `row` of all Q, all K, all V."""
    projection, rest = divmod(row, width)
    index, dimension = divmod(rest, head)
    return (3 * index + projection) * head + dimension


def model_metadata(file: Path) -> dict[str, Any]:
    """The model's metadata without the architecture's prefix."""
    metadata = read_metadata(file)
    prefix = f"{metadata['general.architecture']}."
    return {
        key.removeprefix(prefix): value
        for key, value in metadata.items()
        if not key.startswith(("general.", "tokenizer."))
    }
