"""Embeddings of encoders other than BERT equal those of transformers, or of numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")
pytest.importorskip("transformers")

from h2o_cpp import Generator
from h2o_cpp.convert import convert
from support import encoders
from support.opt_checkpoint import read_metadata, read_tensors, write_json, write_safetensors
from support.scripted_opt import VISIBLE

N_VOCAB = len(encoders.WORD_PIECES)
SIZES = {
    "vocab_size": N_VOCAB, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 3,
    "intermediate_size": 80, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip

# Sums of up to 80 products of numbers near 1 in float32, in 4 layers.
TOLERANCE = 5e-5

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "nomic-bert": ("NomicBertModel", {"max_position_embeddings": 300, "type_vocab_size": 2}),
    "modern-bert": ("ModernBertModel", {"max_position_embeddings": 300, "local_attention": 16}),
    "modern-bert silu": (
        "ModernBertModel",
        {
            "max_position_embeddings": 300, "local_attention": 600, "hidden_activation": "silu",
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma-embedding": (
        "Gemma3TextModel",
        {
            "max_position_embeddings": 300, "use_bidirectional_attention": True,
            "sliding_window": 16, "head_dim": 32, "num_key_value_heads": 1,
            "num_hidden_layers": 7, "query_pre_attn_scalar": 24,
        },
    ),
    "xlm-roberta": (
        "XLMRobertaModel",
        {"max_position_embeddings": 302, "type_vocab_size": 1, "pad_token_id": 1},
    ),
}  # fmt: skip


def texts(n_ctx: int = 300) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(4, N_VOCAB, n).tolist() for n in (1, 9, 30, 65, n_ctx)]


def embeddings(path: Path, tokens: list[list[int]], device: str = "cpu") -> NDArray[np.float32]:
    with Generator(path, threads=2, n_ctx=0, device=device) as generator:
        assert generator.is_encoder
        return generator.embed(tokens, pooling="mean", normalize=False)


@pytest.mark.parametrize("name", RECIPES)
def test_embeddings_equal_transformers(tmp_path: Path, name: str, exact_device: str) -> None:
    kind, options = RECIPES[name]
    model = encoders.make(kind, **{**SIZES, **options})
    encoders.save(model, tmp_path)
    encoders.write_word_pieces(tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    architecture = read_metadata(tmp_path / "model.gguf")["general.architecture"]
    assert architecture == {"xlm-roberta": "bert"}.get(name, name.partition(" ")[0])
    expected = [encoders.hidden_states(model, text).mean(0) for text in texts()]
    found = embeddings(tmp_path / "model.gguf", texts(), exact_device)
    np.testing.assert_allclose(found, np.stack(expected), rtol=0, atol=TOLERANCE)


def test_embedding_gemma_passes_dense_layers(tmp_path: Path) -> None:
    """Those that sentence-transformers has after pooling."""
    kind, options = RECIPES["gemma-embedding"]
    encoders.save(encoders.make(kind, **{**SIZES, **options}), tmp_path)
    encoders.write_word_pieces(tmp_path)
    convert(tmp_path, tmp_path / "plain.gguf", "f32")
    rng = np.random.default_rng(2)
    modules = [{"type": f"sentence_transformers.models.{one}", "path": one} for one in ("Pooling",)]
    weights = []
    for path, shape in (("2_Dense", (96, 48)), ("3_Dense", (48, 96))):
        (tmp_path / path).mkdir()
        weights.append(rng.normal(0, 0.2, shape).astype(np.float32))
        write_safetensors(tmp_path / path / "model.safetensors", {"linear.weight": weights[-1]})
        activation = "torch.nn.modules.linear.Identity"
        config = {"bias": False, "activation_function": activation}
        write_json(tmp_path / path / "config.json", config)
        modules.append({"type": "sentence_transformers.models.Dense", "path": path})
    (tmp_path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    notes = convert(tmp_path, tmp_path / "model.gguf", "f32")
    assert not any("Dense" in note for note in notes)
    assert read_metadata(tmp_path / "model.gguf")["gemma-embedding.dense_2_feat_out"] == 96
    plain = embeddings(tmp_path / "plain.gguf", texts())
    found = embeddings(tmp_path / "model.gguf", texts())
    expected = plain.astype(np.float64) @ weights[0].T @ weights[1].T
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_nomic_config_with_the_keys_of_the_hub(tmp_path: Path) -> None:
    """config.json as of nomic-embed-text-v1.5, whose tensors transformers saves by their names."""
    kind, options = RECIPES["nomic-bert"]
    encoders.save(encoders.make(kind, **{**SIZES, **options}), tmp_path)
    encoders.write_word_pieces(tmp_path)
    convert(tmp_path, tmp_path / "ours.gguf", "f32")
    config = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "n_embd": 48, "n_head": 3,
        "n_inner": 80, "n_layer": 4, "n_positions": 8192, "vocab_size": N_VOCAB,
        "type_vocab_size": 2, "activation_function": "swiglu", "rotary_emb_base": 1000,
        "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048, "qkv_proj_bias": False,
    }  # fmt: skip
    write_json(tmp_path / "config.json", config)
    convert(tmp_path, tmp_path / "hub.gguf", "f32")
    assert read_metadata(tmp_path / "hub.gguf")["nomic-bert.context_length"] == 2048
    ours, hub = (embeddings(tmp_path / f"{name}.gguf", texts()) for name in ("ours", "hub"))
    np.testing.assert_array_equal(ours, hub)


# ---- jina-embeddings-v2, which is not in transformers ----


def jina(weights: dict[str, NDArray[np.float32]], tokens: list[int]) -> NDArray[np.float64]:
    """The last hidden states, from arXiv 2310.19923: BERT with ALiBi, both ways, and GeGLU."""
    from torch import as_tensor
    from torch.nn.functional import gelu

    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def linear(name: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
        product: NDArray[np.float64] = x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)
        return product

    def norm(name: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        normalized: NDArray[np.float64] = x * w[f"{name}.weight"] + w[f"{name}.bias"]
        return normalized

    n_heads, n = 4, len(tokens)
    slopes = 2.0 ** (-8 / n_heads * np.arange(1, n_heads + 1))
    distances = np.abs(np.arange(n)[:, None] - np.arange(n))
    x = w["embeddings.word_embeddings.weight"][tokens]
    x = norm("embeddings.LayerNorm", x + w["embeddings.token_type_embeddings.weight"][0])
    for layer in range(2):
        at = f"encoder.layer.{layer}."
        q, k, v = (
            linear(f"{at}attention.self.{one}", x).reshape(n, n_heads, -1).swapaxes(0, 1)
            for one in ("query", "key", "value")
        )
        logits = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]) - slopes[:, None, None] * distances
        exps = np.exp(logits - logits.max(-1, keepdims=True))
        mixed = (exps / exps.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(n, -1)
        x = norm(
            f"{at}attention.output.LayerNorm", x + linear(f"{at}attention.output.dense", mixed)
        )
        gate, up = np.split(linear(f"{at}mlp.gated_layers", x), 2, axis=1)
        x = norm(
            f"{at}mlp.layernorm", x + linear(f"{at}mlp.wo", gelu(as_tensor(gate)).numpy() * up)
        )
    return x


def test_jina_embeddings_equal_numpy(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    n, ff = 32, 48
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings": (N_VOCAB, n),
        "embeddings.token_type_embeddings": (2, n),
        "embeddings.LayerNorm": (n,),
    }
    for i in range(2):
        at = f"encoder.layer.{i}."
        shapes |= {f"{at}attention.self.{one}": (n, n) for one in ("query", "key", "value")}
        shapes |= {f"{at}attention.output.dense": (n, n), f"{at}attention.output.LayerNorm": (n,)}
        shapes |= {f"{at}mlp.gated_layers": (2 * ff, n), f"{at}mlp.wo": (n, ff)}
        shapes[f"{at}mlp.layernorm"] = (n,)
    weights = {}
    for name, shape in shapes.items():
        scale, mean = (0.2, 1) if "orm" in name else (1.5 / shape[-1] ** 0.5, 0)
        weights[f"{name}.weight"] = rng.normal(mean, scale, shape).astype(np.float32)
        if (name.startswith("encoder") and "gated" not in name) or "orm" in name:
            weights[f"{name}.bias"] = rng.normal(0, 0.2, shape[:1]).astype(np.float32)
    write_safetensors(tmp_path / "model.safetensors", weights)
    config = {
        "architectures": ["JinaBertForMaskedLM"], "hidden_size": n, "intermediate_size": ff,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": N_VOCAB,
        "max_position_embeddings": 300, "type_vocab_size": 2, "hidden_act": "gelu",
        "position_embedding_type": "alibi", "feed_forward_type": "geglu",
        "layer_norm_eps": 1e-12,
    }  # fmt: skip
    write_json(tmp_path / "config.json", config)
    encoders.write_word_pieces(tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    expected = [jina(weights, text).mean(0) for text in texts()]
    found = embeddings(tmp_path / "model.gguf", texts())
    np.testing.assert_allclose(found, np.stack(expected), rtol=0, atol=TOLERANCE)


def test_bge_reranker_scores_equal_transformers(tmp_path: Path) -> None:
    import torch

    options = {**SIZES, **RECIPES["xlm-roberta"][1], "num_labels": 1}
    model = encoders.make("XLMRobertaForSequenceClassification", **options)
    encoders.save(model, tmp_path)
    encoders.write_word_pieces(tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    assert {"cls.weight", "cls.output.bias"} <= read_tensors(tmp_path / "model.gguf").keys()
    with torch.no_grad():
        tokens = texts(65)
        expected = [model.double()(torch.tensor([text])).logits[0].numpy() for text in tokens]
    with Generator(tmp_path / "model.gguf", threads=1) as generator, generator.engine() as engine:
        for text, logits in zip(tokens, expected, strict=True):
            result = engine.submit(text, pooling="rank")
            result.result()
            np.testing.assert_allclose(result.embedding, logits, rtol=0, atol=TOLERANCE)


def test_roberta_reads_pairs_with_two_separators(tmp_path: Path) -> None:
    """With its byte-level BPE, as cross-encoders of RoBERTa have it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokens = [*special[:4], *VISIBLE, "ab", "Ġa", special[4]]
    merges = [("a", "b"), ("Ġ", "a")]
    original = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    original.add_special_tokens(special)
    original.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    original.save(str(tmp_path / "tokenizer.json"))
    options = {**SIZES, **RECIPES["xlm-roberta"][1], "vocab_size": len(tokens), "num_labels": 1}
    options |= {"bos_token_id": 0, "eos_token_id": 2}
    model = encoders.make("RobertaForSequenceClassification", **options)
    encoders.save(model, tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    with Generator(tmp_path / "model.gguf", threads=1) as generator:
        pair = generator.tokenizer.encode_pair("ab", "a x")
        assert pair == original.encode("ab", "a x").ids
        [found] = generator.rerank("ab", ["a x"])
    with torch.no_grad():
        logit = model.double()(torch.tensor([pair])).logits.item()
    assert found == pytest.approx(1 / (1 + np.exp(-logit)), abs=TOLERANCE)
