"""Random OPT models made with Hugging Face transformers, and how exact float32 logits are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opt_checkpoint import MERGES, TOKENS, write_json


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    n_embd: int
    n_heads: int
    n_ff: int
    n_layers: int = 2
    n_vocab: int = 61
    n_ctx: int = 40
    tied: bool = True


SHAPES = {
    "plain": Shape(n_embd=32, n_heads=4, n_ff=128),
    "odd_heads": Shape(n_embd=39, n_heads=3, n_ff=50),
    "one_head": Shape(n_embd=24, n_heads=1, n_ff=17, n_layers=1),
    "wide_untied": Shape(n_embd=48, n_heads=8, n_ff=100, n_layers=3, tied=False),
    "head_dim_one": Shape(n_embd=16, n_heads=16, n_ff=33),
}


def make_model(shape: Shape, seed: int) -> Any:
    """An OPTForCausalLM in float32 with every parameter random, biases and norms too."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        hidden_size=shape.n_embd,
        word_embed_proj_dim=shape.n_embd,
        num_attention_heads=shape.n_heads,
        ffn_dim=shape.n_ff,
        num_hidden_layers=shape.n_layers,
        vocab_size=shape.n_vocab,
        max_position_embeddings=shape.n_ctx,
        tie_word_embeddings=shape.tied,
        bos_token_id=2,
        eos_token_id=2,
        pad_token_id=1,
    )
    model: Any = OPTForCausalLM(config)
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 1, generator=generator)
            if "layer_norm.weight" in name:
                parameter.mul_(0.2).add_(1)
            elif parameter.ndim == 2:
                parameter.div_(parameter.shape[1] ** 0.5)  # outputs about as large as inputs
    return model


def save_checkpoint(model: Any, path: Path) -> None:
    """As Hugging Face saves it, with a small vocabulary."""
    model.save_pretrained(path)
    write_json(path / "vocab.json", {token: i for i, token in enumerate(TOKENS)})
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]), encoding="utf-8")


def random_tokens(shape: Shape, seed: int) -> NDArray[np.int64]:
    """A text of n_ctx tokens."""
    return np.random.default_rng(seed).integers(0, shape.n_vocab, shape.n_ctx)


def reference_logits(model: Any, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Logits [n, n_vocab] in double precision."""
    import torch

    with torch.no_grad():
        logits: NDArray[np.float64] = (
            model.double()(torch.as_tensor(tokens)[None]).logits[0].numpy()
        )
    return logits


def float32_tolerance(shape: Shape, logits: NDArray[np.float64]) -> float:
    """How far logits in float32 may be from exact ones.

    A value passes through these many roundings in a row, each of relative size 2^-24 and random
    sign: for every layer the sums of four projections and the two of the feed-forward block, the
    dot product and the sum over the keys of attention, two norms; then the last norm and the
    output. Errors of random sign grow with the square root of their number; six standard
    deviations of that, relative to the largest logit, hold for every one of some thousands.
    """
    layer = 4 * shape.n_embd + shape.n_embd + shape.n_ff + shape.n_ctx + 3 * shape.n_embd
    roundings = shape.n_layers * layer + 3 * shape.n_embd
    return float(6 * 2.0**-24 * np.sqrt(roundings) * np.abs(logits).max())
