"""Multi-head latent attention: one cached vector per token, which all query heads share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType
from numpy.typing import NDArray

from h2o_cpp import Generator, Policy, capacity
from h2o_cpp.arguments import KvDType
from h2o_cpp.budget.cache_memory import ModelShape, slab_bytes
from support.changed_gguf import changed
from support.converted_files import check_evicts, make_file
from support.h2o_rules import ReferenceCache
from support.needs import packages
from support.random_models import (
    LATENTS,
    N_CTX,
    Recipe,
    float32_tolerance,
    make_model,
    products_error,
    random_tokens,
    reference_logits,
)
from support.rounded_weights import check_rounded_weights

pytestmark = packages("torch", "transformers", "safetensors")


@pytest.fixture(scope="module", params=LATENTS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return make_model(LATENTS[name], 31).double()


@pytest.fixture(scope="module")
def path(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_file(make_model(LATENTS[name], 31), tmp_path_factory.mktemp("latent"))


class Reference:
    """The model with keys and values of every head, one ReferenceCache per layer.

    A cached token has the keys, and the values, of all heads one after another; a query is zero but
    for its own head. So all heads share the token, though none of this is latent.
    """

    def __init__(self, model: Any, policy: Policy) -> None:
        self.model, config = model, model.config
        self.heads = config.num_attention_heads
        self.plain, self.n_rot = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v, self.rank = config.v_head_dim, config.kv_lora_rank
        self.width = self.heads * max(self.plain + self.n_rot, self.v)
        self.caches = [
            ReferenceCache(self.heads, 1, policy, output_weight=self._output_weight(layer))
            for layer in model.model.layers
        ]
        self.n_read = 0

    def _output_weight(self, layer: Any) -> NDArray[np.float64]:
        """W_O with a block of columns for each head's values among those of all."""
        weight = layer.self_attn.o_proj.weight.detach().numpy()
        spread = np.zeros((len(weight), self.heads, self.width))
        for h in range(self.heads):
            mine = slice(h * self.v, (h + 1) * self.v)
            spread[:, h, mine] = weight[:, mine]
        return spread.reshape(len(weight), -1)

    def _rotated(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Pairs (2 i, 2 i + 1) of x [n, ..., n_rot], rotated by the rows' positions."""
        rotary = self.model.model.rotary_emb
        positions = self.n_read + np.arange(len(x))
        angles = np.outer(positions, rotary.inv_freq.double().numpy())
        turns = np.exp(1j * angles) * rotary.attention_scaling
        turns = turns.reshape(len(x), *[1] * (x.ndim - 2), -1)
        pairs = (x[..., ::2] + 1j * x[..., 1::2]) * turns
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

    def _temperatures(self, n: int) -> NDArray[np.float64]:
        """Mistral's factors of queries [n, 1, 1], by their positions."""
        rope = self.model.config.rope_parameters
        if rope.get("llama_4_scaling_beta") is None:
            return np.ones((n, 1, 1))
        lengths = (self.n_read + np.arange(n)) // rope["original_max_position_embeddings"]
        factors: NDArray[np.float64] = 1 + rope["llama_4_scaling_beta"] * np.log(1.0 + lengths)
        return factors[:, None, None]

    def _attend(self, attention: Any, cache: ReferenceCache, x: Any) -> Any:
        import torch

        n = len(x)
        if attention.q_lora_rank is None:
            q = attention.q_proj(x)
        else:
            q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))
        q = q.numpy().reshape(n, self.heads, -1)
        both = attention.kv_a_proj_with_mqa(x)
        kv = attention.kv_b_proj(attention.kv_a_layernorm(both[:, : self.rank])).numpy()
        kv = kv.reshape(n, self.heads, -1)
        k_rot = np.repeat(self._rotated(both[:, self.rank :].numpy())[:, None], self.heads, 1)
        q = np.concatenate([q[..., : self.plain], self._rotated(q[..., self.plain :])], -1)
        k = np.concatenate([kv[..., : self.plain], k_rot], -1)

        size = self.plain + self.n_rot
        queries = np.zeros((n, self.heads, self.width))
        for h in range(self.heads):
            queries[:, h, h * size : (h + 1) * size] = q[:, h]
        queries *= attention.scaling * np.sqrt(self.width) * self._temperatures(n)
        keys, values = np.zeros((2, n, 1, self.width))
        keys[:, 0, : self.heads * size] = k.reshape(n, -1)
        values[:, 0, : self.heads * self.v] = kv[..., self.plain :].reshape(n, -1)
        out = cache.attend(queries, keys, values)
        mine = [out[:, h, h * self.v : (h + 1) * self.v] for h in range(self.heads)]
        return attention.o_proj(torch.from_numpy(np.concatenate(mine, -1)))

    def read(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The logits after each token of a chunk."""
        import torch

        with torch.no_grad():
            x = self.model.model.embed_tokens(torch.as_tensor(tokens))
            for layer, cache in zip(self.model.model.layers, self.caches, strict=True):
                x = x + self._attend(layer.self_attn, cache, layer.input_layernorm(x))
                x = x + layer.mlp(layer.post_attention_layernorm(x)[None])[0]
            logits: NDArray[np.float64] = self.model.lm_head(self.model.model.norm(x)).numpy()
        self.n_read += len(tokens)
        return logits


@pytest.mark.parametrize("n_batch", [1, 7, 64])
@pytest.mark.parametrize(
    "policy",
    [Policy.full(), Policy.h2o(4, 5), Policy.h2o(3, 4, sinks=2, value_norm="output")],
    ids=["full", "h2o", "outputs"],
)
def test_evicts_by_scores_summed_over_all_heads(
    name: str, model: Any, path: Path, policy: Policy, n_batch: int, exact_device: str
) -> None:
    """In decode (chunks of one token) and prefill, as an implementation with whole heads does."""
    reference, recipe = Reference(model, policy), LATENTS[name]
    check_evicts(reference, path, recipe, policy, n_batch, seed=32, device=exact_device)


def dense(name: str, **options: object) -> Recipe:
    """Without experts, whose choice can change by any rounding."""
    recipe = LATENTS[name]
    options = {"first_k_dense_replace": recipe.n_layers, **options}
    return dataclasses.replace(recipe, options=recipe.options | options)


@pytest.mark.parametrize("outtype", ["bf16", "q8_0"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_rounded_weights_change_logits_within_bound(
    tmp_path: Path, family: str, outtype: str
) -> None:
    check_rounded_weights(tmp_path, dense(family), outtype, seed=36)


def test_the_cache_has_one_vector_per_token(name: str, path: Path) -> None:
    options = LATENTS[name].options
    width = options["kv_lora_rank"] + options["qk_rope_head_dim"]
    n_layers, n_ctx = LATENTS[name].n_layers, LATENTS[name].n_ctx
    shape = ModelShape.of_file(path)
    assert (shape.n_kv_heads, shape.head_dim) == (1, width)
    as_keys_and_values = dataclasses.replace(shape, shared_values=False)
    sizes = [
        slab_bytes(one, Policy.full(), n_ctx=n_ctx, kv_dtype="f16", positions="auto")
        for one in (shape, as_keys_and_values)
    ]
    # Each array is aligned to 64 bytes.
    assert abs(sizes[1] - sizes[0] - n_layers * n_ctx * width * 2) <= n_layers * 64
    with Generator(path, memory="100KiB", hh=8, threads=1) as generator:
        assert generator.max_sequences == capacity(path, "100KiB", hh=8)
        assert generator.stats().cache_bytes <= 100 * 1024


def test_continues_from_a_snapshot(path: Path) -> None:
    tokens = random_tokens(34).tolist()
    with Generator(path, hh=9, threads=1) as generator:
        whole = generator.stream(tokens[:20], max_tokens=8, temperature=0, ignore_eos=True)
        text = "".join(whole)
        first = generator.stream(tokens[:20], max_tokens=3, temperature=0, ignore_eos=True)
        begun = "".join(first)
        snapshot = first.save()
        generator.generate([tokens], max_tokens=1)
        rest = generator.stream([], after=snapshot, max_tokens=5, temperature=0, ignore_eos=True)
        assert begun + "".join(rest) == text
        assert [*first.tokens, *rest.tokens] == whole.tokens.tolist()


def test_positions_roll(name: str, path: Path) -> None:
    """Past the trained length, with a budget."""
    if name == "mistral4":
        with pytest.raises(ValueError, match="original positions in the scale of its queries"):
            Generator(path, hh=9, threads=1, positions="rolling")
        return
    with Generator(path, hh=9, threads=1, positions="rolling") as generator:
        stream = generator.stream([5, 6, 7], max_tokens=3 * N_CTX, temperature=0, ignore_eos=True)
        "".join(stream)
        assert len(stream.tokens) == 3 * N_CTX


def test_what_latent_vectors_do_not_support_is_refused(path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"kv_dtype": ("f16", "f32")}, "keys in F16, values in F32: expected the same type"),
        ({"archive": "f16", "hh": 8}, "do not support an archive"),
        ({"policy": Policy.h2o(4, 4, value_norm="l1")}, r"their own norm \(l1\)"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            Generator(path, threads=1, **options)


def test_quantized_latents(tmp_path: Path) -> None:
    """Vectors of whole blocks."""
    recipe = dense("deepseek_v3", kv_lora_rank=58)
    model = make_model(recipe, 35)
    path = make_file(model, tmp_path)
    tokens = random_tokens(35)
    expected = reference_logits(model, tokens)
    types: list[tuple[KvDType, int]] = [("q8_0", 7), ("bf16", 8)]
    for kv_dtype, bits in types:
        with Generator(path, kv_dtype=kv_dtype) as generator:
            error = np.abs(generator.logits(tokens) - expected).max()
        assert 0 < error < products_error(recipe, bits) * np.abs(expected).max()


def test_keys_and_values_in_one_matrix(tmp_path: Path) -> None:
    """llama.cpp's files of before 2025."""
    recipe = LATENTS["deepseek_v2"]
    model = make_model(recipe, 37)
    path = make_file(model, tmp_path)
    layers = range(recipe.n_layers)
    whole = {
        f"blk.{i}.attn_kv_b.weight": layer.self_attn.kv_b_proj.weight.detach().numpy()
        for i, layer in enumerate(model.model.layers)
    }
    sizes = {"key_length": 16, "value_length": 9, "head_count_kv": 4}
    keys = {f"deepseek2.attention.{key}": (n, GGUFValueType.UINT32) for key, n in sizes.items()}
    split = [f"blk.{i}.attn_{part}_b.weight" for i in layers for part in "kv"]
    split += [f"deepseek2.attention.{part}_length_mla" for part in ("key", "value")]
    old = changed(path, tmp_path / "old.gguf", keys, whole, without=split)
    tokens = random_tokens(37)
    expected = reference_logits(model, tokens)
    with Generator(old, kv_dtype="f32") as generator:
        logits = generator.logits(tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=float32_tolerance(recipe, expected))
