"""Tiny random OPT checkpoints in HF format, and GGUF readers based on gguf-py."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

CONFIG: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 10,
    "vocab_size": 12,
    "word_embed_proj_dim": 64,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "Ġ", "ab", "Ġa"]
MERGES = ["a b", "Ġ a"]
LAYER = {  # names from gguf.md, section 4, written independently
    "attn_norm": "self_attn_layer_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "final_layer_norm",
    "ffn_up": "fc1",
    "ffn_down": "fc2",
}
NUMPY_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I8": "i1", "BOOL": "?"}


def random_weights(config: dict[str, Any]) -> Arrays:
    """Weights by HF name, rounded to bf16 and f16, so that every dtype is exact."""
    rng = np.random.default_rng(0)
    width, hidden = config["hidden_size"], config["ffn_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config["vocab_size"], width),
        "embed_positions.weight": (config["max_position_embeddings"] + 2, width),
        "final_layer_norm.weight": (width,),
        "final_layer_norm.bias": (width,),
    }
    for i in range(config["num_hidden_layers"]):
        for module in LAYER.values():
            rows = hidden if module == "fc1" else width
            columns = () if "norm" in module else (hidden if module == "fc2" else width,)
            shapes[f"layers.{i}.{module}.weight"] = (rows, *columns)
            shapes[f"layers.{i}.{module}.bias"] = (rows,)
    return {
        f"model.decoder.{name}": (rng.integers(-127, 128, shape) / 64).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_safetensors(
    path: Path, weights: Arrays, dtype: str = "F32", dtypes: dict[str, str] | None = None
) -> None:
    """Write weights as `dtype`, except those in `dtypes`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in weights.items():
        kind = (dtypes or {}).get(name, dtype)
        if kind == "BF16":
            encoded = quantize(values, GGMLQuantizationType.BF16).tobytes()
        else:
            encoded = values.astype(NUMPY_DTYPES[kind]).tobytes()
        offsets = [len(data), len(data) + len(encoded)]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": offsets}
        data += encoded
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_shards(checkpoint: Path, names: list[str]) -> dict[str, str]:
    """Replace model.safetensors with shards and an index; returns its weight_map."""
    weights = random_weights(CONFIG)
    weight_map = {key: names[i % len(names)] for i, key in enumerate(weights)}
    for file in names:
        part = {key: weights[key] for key in weights if weight_map[key] == file}
        write_safetensors(checkpoint / file, part)
    write_json(checkpoint / "model.safetensors.index.json", {"weight_map": weight_map})
    (checkpoint / "model.safetensors").unlink()
    return weight_map


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_tokenizer_json(path: Path, changes: dict[str, object] | None = None) -> None:
    """Write the tokenizer as tokenizer.json; `changes` are by dotted key."""
    tokenizer: dict[str, Any] = {
        "added_tokens": [{"id": 2, "content": "</s>", "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(TOKENS)},
            "merges": [merge.split(" ") for merge in MERGES],
        },
    }
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        place = tokenizer
        for parent in parents:
            place = place[parent]
        place[last] = value
    write_json(path / "tokenizer.json", tokenizer)


def make_checkpoint(path: Path, **config: object) -> Arrays:
    """Write a random checkpoint with config overrides; returns its weights by HF name."""
    path.mkdir(exist_ok=True)
    weights = random_weights(CONFIG | config)
    write_json(path / "config.json", CONFIG | config)
    write_safetensors(path / "model.safetensors", weights)
    write_json(path / "vocab.json", {token: i for i, token in enumerate(TOKENS)})
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]), encoding="utf-8")
    special = {"bos_token": {"content": "</s>"}, "eos_token": "</s>", "unk_token": "</s>"}
    write_json(path / "special_tokens_map.json", special)
    return weights


def expected_tensors(weights: Arrays, layers: int = CONFIG["num_hidden_layers"]) -> Arrays:
    """The expected tensors of the GGUF file, by GGUF name."""
    names = {"token_embd": "embed_tokens", "output_norm": "final_layer_norm"}
    for i in range(layers):
        names |= {f"blk.{i}.{gguf}": f"layers.{i}.{hf}" for gguf, hf in LAYER.items()}
    tensors = {
        f"{gguf}.{part}": weights[f"model.decoder.{hf}.{part}"]
        for gguf, hf in names.items()
        for part in ("weight", "bias")
        if f"model.decoder.{hf}.{part}" in weights
    }
    tensors["position_embd.weight"] = weights["model.decoder.embed_positions.weight"][2:]
    if "lm_head.weight" in weights:
        tensors["output.weight"] = weights["lm_head.weight"]
    return tensors


def read_tensors(path: Path) -> dict[str, tuple[GGMLQuantizationType, Array]]:
    """Types and dequantised values of a GGUF file's tensors, by name."""
    return {
        tensor.name: (tensor.tensor_type, dequantize(tensor.data, tensor.tensor_type))
        for tensor in GGUFReader(path).tensors
    }


def read_metadata(path: Path) -> dict[str, Any]:
    return {
        key: field.contents()
        for key, field in GGUFReader(path).fields.items()
        if not key.startswith("GGUF.")
    }
