"""Encoders, whose tokens attend to later ones too: BERT, RoBERTa, nomic-embed-text,
jina-embeddings-v2 and ModernBERT.

Their files have llama.cpp's names. A head that scores pairs of texts is `cls`, then `cls.output`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from h2o_cpp.convert.checkpoint import SourceTensor, open_tensors, read_optional_json
from h2o_cpp.convert.config import Config, Metadata, dimension, flag, found_key, number
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.gpt import gelu_form
from h2o_cpp.convert.modules import Module, Sizes, count, gated_mlp
from h2o_cpp.convert.rope import rope_metadata, rope_of_windows
from h2o_cpp.convert.window import sliding_layers

_RANK = 4  # pooling_type of models that score texts


def _norm(gguf: str, hf: str) -> Module:
    return Module(gguf, hf, ("embd",), bias=True)


def with_dense_layers(
    family: Family, checkpoint: Path, tensors: dict[str, SourceTensor]
) -> tuple[Family, dict[str, SourceTensor]]:
    """The family and tensors with the two layers that an embedding of EmbeddingGemma passes, if
    the files of sentence-transformers name such layers and nothing else."""
    further = further_modules(checkpoint)
    paths = [checkpoint / path for kind, path in further if kind == "Dense"]
    configs = [read_optional_json(path / "config.json") for path in paths]
    plain = all(
        config.get("bias") is False and "Identity" in str(config.get("activation_function"))
        for config in configs
    )
    if len(paths) != 2 or not plain or len(further) > 2:
        return family, tensors
    both = [open_tensors(path).get("linear.weight") for path in paths]
    if None in both:
        return family, tensors
    found = {f"dense_{i}.weight": one for i, one in enumerate(both, 2) if one is not None}
    n_dense, n_embd = found["dense_3.weight"].shape[::-1]
    own_sizes, details = family.more_sizes, family.details

    def sizes(config: Config) -> Sizes:
        return {**own_sizes(config), "dense": n_dense, "embedding": n_embd}

    modules = (
        Module("dense_2", "dense_2", ("dense", "embd")),
        Module("dense_3", "dense_3", ("embedding", "dense")),
    )

    def metadata(config: Config, sizes: Sizes) -> Metadata:
        ends = {"2_feat_in": "embd", "2_feat_out": "dense", "3_feat_in": "dense"}
        keys = {f"dense_{end}": sizes[size] for end, size in ends.items()}
        return {**details(config, sizes), **keys, "dense_3_feat_out": n_embd}

    family = replace(family, more_sizes=sizes, more_modules=modules, details=metadata)
    return family, {**tensors, **found}


def further_modules(checkpoint: Path) -> list[tuple[str, str]]:
    """Kinds and paths of what changes an embedding after pooling, by the files of
    sentence-transformers."""
    try:
        modules = json.loads((checkpoint / "modules.json").read_text(encoding="utf-8"))
        kinds = [(str(one["type"]).rpartition(".")[2], str(one.get("path", ""))) for one in modules]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return [one for one in kinds if one[0] not in ("Transformer", "Pooling", "Normalize")]


# ---- BERT ----

_BERT_LAYER = (
    Module("attn_q", "attention.self.query", ("q", "embd"), bias=True),
    Module("attn_k", "attention.self.key", ("kv", "embd"), bias=True),
    Module("attn_v", "attention.self.value", ("kv", "embd"), bias=True),
    Module("attn_output", "attention.output.dense", ("embd", "q"), bias=True),
    _norm("attn_output_norm", "attention.output.LayerNorm"),
    Module("ffn_up", "intermediate.dense", ("ff", "embd"), bias=True),
    Module("ffn_down", "output.dense", ("embd", "ff"), bias=True),
    _norm("layer_output_norm", "output.LayerNorm"),
)


def _bert_sizes(config: Config) -> Sizes:
    rows = dimension(config, "max_position_embeddings", 512)
    return {
        "first_position": 0,
        "position_rows": rows,
        "types": dimension(config, "type_vocab_size", 2),
        "labels": _n_labels(config),
    }


def _n_labels(config: Config) -> int:
    """The number of labels; transformers' default is two."""
    names = config.get("id2label")
    return len(names) if isinstance(names, Mapping) else dimension(config, "num_labels", 2)


def _encoder_details(sizes: Sizes) -> Metadata:
    """Metadata of every encoder."""
    values: Metadata = {"context_length": sizes["context"], "attention.causal": False}
    if "types" in sizes:
        values["tokenizer.ggml.token_type_count"] = sizes["types"]
    return values


def _bert_details(config: Config, sizes: Sizes) -> Metadata:
    n_positions = sizes["position_rows"] - sizes["first_position"]
    return {
        **_encoder_details({**sizes, "context": n_positions}),
        **gelu_form("bert", config, "hidden_act", "gelu"),
    }


BERT = Family(
    architecture="bert",
    layer=lambda config, index: _BERT_LAYER,
    fixed=(
        ("position_embedding_type", "absolute", "positions are relative"),
        ("is_decoder", False, "tokens attend only to earlier ones"),
        ("add_cross_attention", False, "tokens attend to another text"),
    ),
    details=_bert_details,
    epsilon=("layer_norm_eps", 1e-12),
    rotated=None,
    base_prefix="bert.",
    layers="encoder.layer",
    embeddings=(
        Module("token_embd", "embeddings.word_embeddings", ("vocab", "embd")),
        Module(
            "position_embd",
            "embeddings.position_embeddings",
            ("position_rows", "embd"),
            rows=("first_position", "position_rows"),
        ),
        Module("token_types", "embeddings.token_type_embeddings", ("types", "embd")),
        _norm("token_embd_norm", "embeddings.LayerNorm"),
    ),
    output_norm=None,
    head=None,
    defaults={"context": 512},
    more_sizes=_bert_sizes,
    # the heads of its training, and an embedding that sentence-transformers do not use
    ignored=re.compile(r"embeddings\.position_ids|pooler\.dense\.\w+|cls\..*|lm_head\..*"),
)


def _scores(base: Family, dense: str, output: str) -> Family:
    """The family with a head that scores texts; dense, output: the names of its matrices."""

    def details(config: Config, sizes: Sizes) -> Metadata:
        return base.details(config, sizes) | {"pooling_type": _RANK}

    return replace(
        base,
        details=details,
        more_modules=(
            Module("cls", dense, ("embd", "embd"), bias=True),
            Module("cls.output", output, ("labels", "embd"), bias=True),
        ),
    )


BERT_SCORES = _scores(BERT, "pooler.dense", "classifier")

# ---- RoBERTa and XLM-RoBERTa (bge-m3, multilingual E5) ----


def _roberta_sizes(config: Config) -> Sizes:
    """Positions begin after that of padding, so the first rows are unused."""
    first = 1 + count(config, "pad_token_id")
    return {**_bert_sizes(config), "first_position": first}


ROBERTA = replace(
    BERT,
    base_prefix="roberta.",
    more_sizes=_roberta_sizes,
    epsilon=("layer_norm_eps", 1e-5),
    absent={"pad_token_id": 1, "type_vocab_size": 1},
)
ROBERTA_SCORES = _scores(ROBERTA, "classifier.dense", "classifier.out_proj")

# ---- nomic-embed-text ----

_NOMIC_LAYER = (
    Module("attn_qkv", "attn.Wqkv", ("qkv", "embd")),
    Module("attn_output", "attn.out_proj", ("embd", "q")),
    _norm("attn_output_norm", "norm1"),
    *gated_mlp("mlp", ("fc12", "fc11", "fc2")),
    _norm("layer_output_norm", "norm2"),
)


def _nomic_details(config: Config, sizes: Sizes) -> Metadata:
    """The Hub's config.json has other keys than transformers 5."""
    context = sizes["context"]
    if "n_positions" in config:  # longer texts need positions that are scaled by their length
        context = min(context, dimension(config, "max_trained_positions", 2048))
    epsilon = found_key(config, ("layer_norm_eps", "layer_norm_epsilon"))
    return {
        **_encoder_details({**sizes, "context": context}),
        "attention.layer_norm_epsilon": number(config, epsilon, 1e-12),
    }


NOMIC_BERT = Family(
    architecture="nomic-bert",
    layer=lambda config, index: _NOMIC_LAYER,
    fixed=(
        ("hidden_act", "silu", "the MLP does not use SiLU"),
        ("activation_function", "swiglu", "the MLP does not use SwiGLU"),
        ("qkv_proj_bias", False, "the attention has biases"),
        ("mlp_fc1_bias", False, "the MLP has biases"),
        ("mlp_fc2_bias", False, "the MLP has biases"),
        ("prenorm", False, "blocks have norms before them"),
        ("rotary_emb_fraction", 1.0, "only a part of a head is rotated"),
        ("rotary_emb_interleaved", False, "pairs of dimensions are rotated"),
        ("rotary_emb_scale_base", None, "positions are scaled"),
        ("moe_every_n_layers", 0, "some layers are mixtures of experts"),
    ),
    details=_nomic_details,
    base_prefix="nomic_bert.",
    layers="encoder.layers",
    embeddings=(BERT.embeddings[0], BERT.embeddings[2], _norm("token_embd_norm", "emb_ln")),
    output_norm=None,
    head=None,
    more_sizes=lambda config: {"types": dimension(config, "type_vocab_size", 2)},
    ignored=BERT.ignored,
    absent={"rotary_emb_base": 1000.0},
)

# ---- jina-embeddings-v2 ----

_JINA_LAYER = (
    *_BERT_LAYER[:5],
    Module("ffn_up", "mlp.gated_layers", ("gate_and_up", "embd")),
    Module("ffn_down", "mlp.wo", ("embd", "ff"), bias=True),
    _norm("layer_output_norm", "mlp.layernorm"),
)
JINA_BERT_V2 = replace(
    BERT,
    architecture="jina-bert-v2",
    layer=lambda config, index: _JINA_LAYER,
    fixed=(
        ("position_embedding_type", "alibi", "positions are embedded"),
        ("feed_forward_type", "geglu", "the MLP does not use GeGLU"),
        ("hidden_act", "gelu", "the MLP does not use GELU"),
    ),
    details=lambda config, sizes: _encoder_details(sizes),
    embeddings=(BERT.embeddings[0], *BERT.embeddings[2:]),
    more_sizes=NOMIC_BERT.more_sizes,
    absent={"position_embedding_type": "absolute", "feed_forward_type": "original"},
)

# ---- ModernBERT ----


def _modern_layer(config: Config, index: int) -> Iterator[Module]:
    if index > 0:
        yield Module("attn_norm", "attn_norm", ("embd",))
    bias = flag(config, "attention_bias", False)
    yield Module("attn_qkv", "attn.Wqkv", ("qkv", "embd"), bias)
    yield Module("attn_output", "attn.Wo", ("embd", "q"), bias)
    yield Module("ffn_norm", "mlp_norm", ("embd",))
    bias = flag(config, "mlp_bias", False)
    yield Module("ffn_up", "mlp.Wi", ("gate_and_up", "embd"), bias)
    yield Module("ffn_down", "mlp.Wo", ("embd", "ff"), bias)


def _modern_details(config: Config, sizes: Sizes) -> Metadata:
    period = dimension(config, "global_attn_every_n_layers", 3)
    layers = [i % period != 0 for i in range(sizes["layers"])]
    if config.get("layer_types") is not None:
        layers = sliding_layers(config)
    usual = [i % 3 != 0 for i in range(sizes["layers"])]
    theta = config.get("global_rope_theta")
    values: Metadata = {
        **_encoder_details(sizes),
        "attention.sliding_window": dimension(config, "local_attention", 128),
        "attention.sliding_window_pattern": 3 if layers == usual else layers,
        **rope_metadata("modern-bert", {"rope_theta": theta or 160000.0, **config}),
        **rope_of_windows(
            "modern-bert",
            {**config, "rope_local_base_freq": config.get("local_rope_theta") or 10000.0},
        ),
    }
    if config.get("hidden_activation", "gelu") == "silu":
        return values | {"hidden_activation": "silu"}
    return values | gelu_form("modern-bert", config, "hidden_activation", "gelu")


MODERN_BERT = Family(
    architecture="modern-bert",
    layer=_modern_layer,
    fixed=(("norm_bias", False, "the norms have biases"),),
    details=_modern_details,
    epsilon=("norm_eps", 1e-5),
    base_prefix="model.",
    embeddings=(
        Module("token_embd", "embeddings.tok_embeddings", ("vocab", "embd")),
        Module("token_embd_norm", "embeddings.norm", ("embd",)),
    ),
    output_norm=Module("output_norm", "final_norm", ("embd",)),
    head=None,
    ignored=re.compile(r"(head|decoder)\..*"),
)

FAMILIES = {
    "BertModel": BERT,
    "BertForMaskedLM": BERT,
    "BertForPreTraining": BERT,
    "BertForSequenceClassification": BERT_SCORES,
    "NomicBertModel": NOMIC_BERT,
    "NomicBertForMaskedLM": NOMIC_BERT,
    "JinaBertModel": JINA_BERT_V2,
    "JinaBertForMaskedLM": JINA_BERT_V2,
    "ModernBertModel": MODERN_BERT,
    "ModernBertForMaskedLM": MODERN_BERT,
    **{
        f"{kind}{name}": family
        for kind in ("Roberta", "XLMRoberta", "Camembert")
        for name, family in (
            ("Model", ROBERTA),
            ("ForMaskedLM", ROBERTA),
            ("ForSequenceClassification", ROBERTA_SCORES),
        )
    },
}
