"""Decode of a long text with a full cache, and with a smaller one that proposes what it generates.

Layers of a real model's shape with random weights read a text of random tokens, once, and continue
it. Attention with random weights says nothing about which tokens matter, so its output is scaled:
the smaller, the more guesses are right. The runs take turns, and their outputs must be equal.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from h2o_bench.models import scale_q8_0
from h2o_bench.results import Row
from h2o_cpp import Generator
from h2o_cpp.cli.argument_types import fractions
from support.shapes import SHAPES, config
from support.synthetic import write_model

_VOCABULARY = 512  # so that the layers dominate a step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="SmolLM2-135M", metavar="SHAPE")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32_768, help="that are read")
    parser.add_argument("--decoded", type=int, default=400, help="after that")
    parser.add_argument("--slots", type=int, default=1024, help="of the cache that proposes")
    parser.add_argument("--scale", type=float, default=0.1, help="of the output of attention")
    parser.add_argument("--temperatures", type=fractions, default=[0.0, 0.8], metavar="X,...")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    n_ctx = args.tokens + args.decoded
    sizes = {"num_hidden_layers": args.layers, "vocab_size": _VOCABULARY}
    common: Any = {"n_ctx": n_ctx, "threads": args.threads, "max_sequences": 1}
    common["prefix_cache"] = "16GiB"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        write_model(path, config(args.shape, **sizes, max_position_embeddings=n_ctx), "Q8_0")
        _scale_attention(path, args.scale)
        generators = [
            Generator(path, **common),
            Generator(path, **common, lossless=True, hh=args.slots),
        ]
    prompt = np.random.default_rng(0).integers(_VOCABULARY, size=args.tokens).tolist()
    for temperature in args.temperatures:
        rates: list[list[float]] = [[], []]
        gains, passes, accepted = [], [], []
        for seed in range(args.rounds):
            full, lossless = (
                generator.generate(
                    prompt, max_tokens=args.decoded, temperature=temperature, seed=seed,
                    ignore_eos=True,
                )
                for generator in generators
            )  # fmt: skip
            if full.text != lossless.text:
                raise RuntimeError(f"the outputs with seed {seed} differ")
            for result, found in zip((full, lossless), rates, strict=True):
                found.append((result.completion_tokens - 1) / result.decode_seconds)
            gains.append(rates[1][-1] / rates[0][-1])
            n_passes = lossless.completion_tokens - lossless.accepted_tokens
            passes.append(lossless.completion_tokens / n_passes)
            accepted.append(lossless.accepted_tokens / max(1, lossless.drafted_tokens))
        yield {
            "temperature": temperature,
            "full, tokens/s": rates[0],
            "lossless": rates[1],
            "gain": gains,
            "tokens per pass": passes,
            "accepted": accepted,
        }


def _scale_attention(path: Path, factor: float) -> None:
    """Multiply the output matrices of attention, in Q8_0, by a factor."""
    for tensor in GGUFReader(path, "r+").tensors:
        if tensor.name.endswith("attn_output.weight"):
            scale_q8_0(tensor.data, factor)
