"""OPT models with random weights for CTranslate2, which does not read GGUF.

    python -m h2o_bench.ctranslate2_model SHAPE DIRECTORY TYPE

A subprocess, because quantizing needs the whole model in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from support.shapes import SHAPES


def vocabulary(n_vocab: int) -> list[str]:
    """Token texts by id."""
    return [f"<{i}>" for i in range(n_vocab)]


def write_opt(directory: Path, config: Mapping[str, Any], type_name: str) -> None:
    """Write a model with the sizes of an OPT config.json, in int8 or float32."""
    from ctranslate2.specs import common_spec, transformer_spec

    width, n_ff = config["hidden_size"], config["ffn_dim"]
    tokens = vocabulary(config["vocab_size"])
    random = np.random.default_rng(0)

    def matrix(n_rows: int, n_cols: int) -> Any:
        return random.standard_normal((n_rows, n_cols), np.float32) / np.float32(n_cols**0.5)

    def set_norm(norm: Any) -> None:
        norm.gamma, norm.beta = np.ones(width, np.float32), np.zeros(width, np.float32)

    def set_linear(linear: Any, n_out: int, n_in: int) -> None:
        linear.weight, linear.bias = matrix(n_out, n_in), np.zeros(n_out, np.float32)

    spec: Any = transformer_spec.TransformerDecoderModelSpec.from_config(
        config["num_hidden_layers"],
        config["num_attention_heads"],
        pre_norm=True,
        activation=common_spec.Activation.RELU,
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.position_encodings.encodings = matrix(config["max_position_embeddings"], width)
    decoder.embeddings.weight = matrix(len(tokens), width)
    decoder.projection.weight = decoder.embeddings.weight
    set_norm(decoder.layer_norm)
    for layer in decoder.layer:
        set_norm(layer.self_attention.layer_norm)
        set_linear(layer.self_attention.linear[0], 3 * width, width)
        set_linear(layer.self_attention.linear[1], width, width)
        set_norm(layer.ffn.layer_norm)
        set_linear(layer.ffn.linear_0, n_ff, width)
        set_linear(layer.ffn.linear_1, width, n_ff)
    spec.config.bos_token, spec.config.unk_token, spec.config.eos_token = tokens[:3]
    spec.register_vocabulary(tokens)
    spec.validate()
    spec.optimize(quantization=type_name)
    spec.save(str(directory))


if __name__ == "__main__":
    write_opt(Path(sys.argv[2]), SHAPES[sys.argv[1]], sys.argv[3])
