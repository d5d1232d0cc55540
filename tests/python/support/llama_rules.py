"""A Llama in numpy with the cache of h2o_rules, in float64: the reference for whole models.

Written from the paper's formulas (arXiv 2302.13971); shares no code with the core.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGUFReader

from h2o_cpp import Policy, Rope
from support.h2o_rules import Array, ReferenceCache


class ReferenceLlama:
    """Reads chunks of one sequence, with the weights of a GGUF file in F32 or F16."""

    def __init__(self, path: Path, policy: Policy, rolls_at: int) -> None:
        """rolls_at: the number of tokens from which positions roll."""
        file = GGUFReader(path)
        self.weights = {
            t.name: np.asarray(t.data, np.float64).reshape(t.shape[::-1]) for t in file.tensors
        }

        def value(key: str, default: float | None = None) -> float:
            field = file.fields.get(f"llama.{key}")
            assert field is not None or default is not None, key
            return float(field.contents()) if field is not None else float(default or 0)

        self.eps = value("attention.layer_norm_rms_epsilon")
        n_heads = int(value("attention.head_count"))
        n_kv_heads = int(value("attention.head_count_kv"))
        self.head_dim = self.weights["blk.0.attn_q.weight"].shape[0] // n_heads
        self.rolls_at = rolls_at
        rope = Rope(theta=value("rope.freq_base", 10000.0), layout="pairs")
        self.caches = [
            ReferenceCache(n_heads, n_kv_heads, policy, rope)
            for _ in range(int(value("block_count")))
        ]

    @property
    def margin(self) -> float:
        """The smallest score difference that decided an eviction."""
        return min(cache.margin for cache in self.caches)

    def step(self, tokens: list[int]) -> Array:
        """Logits [n, n_vocab]."""
        w = self.weights
        x = w["token_embd.weight"][tokens]
        for i, cache in enumerate(self.caches):
            if cache.seen >= self.rolls_at and cache.rope is not None:
                cache.rope = replace(cache.rope, positions="rolling")
            block = f"blk.{i}."
            h = self._norm(x, w[block + "attn_norm.weight"])
            q, k, v = (
                (h @ w[f"{block}attn_{name}.weight"].T).reshape(len(x), -1, self.head_dim)
                for name in "qkv"
            )
            attended = cache.attend(q, k, v).reshape(len(x), -1)
            x = x + attended @ w[block + "attn_output.weight"].T
            h = self._norm(x, w[block + "ffn_norm.weight"])
            gate = h @ w[block + "ffn_gate.weight"].T
            up = h @ w[block + "ffn_up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[block + "ffn_down.weight"].T
        output = w.get("output.weight", w["token_embd.weight"])
        logits: Array = self._norm(x, w["output_norm.weight"]) @ output.T
        return logits

    def _norm(self, x: Array, weight: Array) -> Array:
        scale: Array = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x * scale * weight
