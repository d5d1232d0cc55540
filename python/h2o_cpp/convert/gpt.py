"""Older families with layer norms and GELU: GPT-2, GPT-J, BLOOM and Falcon."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, check_fixed, dimension, flag, number, refuse
from h2o_cpp.convert.family import Family, Metadata, Module, TensorSpec
from h2o_cpp.convert.gptneox import ACTIVATIONS, grouped_by_projection
from h2o_cpp.convert.rope import rope_metadata


class _Shape(NamedTuple):
    """What every one of them has, by whatever key."""

    width: int
    ff: int
    layers: int
    heads: int
    vocab: int
    context: int

    @property
    def sizes(self) -> dict[str, int]:
        width = self.width
        sizes = {"vocab": self.vocab, "embd": width, "ff": self.ff, "qkv": 3 * width}
        return sizes | {"head": width // self.heads}

    def metadata(self, config: Config, activation: str | None) -> Metadata:
        values: Metadata = {
            "context_length": self.context,
            "embedding_length": self.width,
            "block_count": self.layers,
            "feed_forward_length": self.ff,
            "attention.head_count": self.heads,
            "attention.layer_norm_epsilon": number(config, "layer_norm_epsilon", 1e-5),
            "vocab_size": self.vocab,
        }
        if activation is not None:
            if activation not in ACTIVATIONS:
                raise refuse("gpt", "activation", activation, "the MLP does not use GELU")
            values["h2o.activation"] = ACTIVATIONS[activation]
        return values


def _shape(architecture: str, config: Config, ff: str, context: tuple[str, int]) -> _Shape:
    def size(*keys: str) -> int:
        return dimension(config, next((k for k in keys if config.get(k) is not None), keys[0]))

    width = size("n_embd", "hidden_size", "n_embed")
    shape = _Shape(
        width=width,
        ff=dimension(config, ff, 4 * width),
        layers=size("n_layer", "num_hidden_layers"),
        heads=size("n_head", "num_attention_heads"),
        vocab=dimension(config, "vocab_size"),
        context=dimension(config, *context),
    )
    if width % shape.heads:
        why = f"the heads do not divide the width {width} evenly"
        raise refuse(architecture, "n_head", shape.heads, why)
    return shape


def _norm(gguf: str, hf: str) -> Module:
    return Module(gguf, hf, ("embd",), bias=True)


def _all(shape: _Shape, before: list[Module], layer: list[Module], tied: bool, bias: bool = False
) -> Iterator[TensorSpec]:  # fmt: skip
    for module in before:
        yield from module.tensors(shape.sizes)
    for i in range(shape.layers):
        for module in layer:
            yield from module.in_layer(i, "h").tensors(shape.sizes)
    yield from _norm("output_norm", "ln_f").tensors(shape.sizes)
    if not tied:
        yield from Module("output", "lm_head", ("vocab", "embd"), bias).tensors(shape.sizes)


# ---- GPT-2 ----

_GPT2_FIXED = (
    ("scale_attn_weights", True, "attention is not scaled"),
    ("scale_attn_by_inverse_layer_idx", False, "attention is scaled by the layer"),
    ("add_cross_attention", False, "there is attention to an encoder"),
)


def _gpt2_shape(config: Config) -> _Shape:
    return _shape("gpt2", config, "n_inner", ("n_positions", 1024))


def _gpt2_metadata(config: Config) -> Metadata:
    check_fixed("gpt2", config, _GPT2_FIXED)
    return _gpt2_shape(config).metadata(config, config.get("activation_function", "gelu_new"))


def _columns(spec: TensorSpec) -> TensorSpec:
    """GPT-2 has its matrices transposed."""
    if len(spec.shape) == 1:
        return spec
    out, width = spec.shape
    return TensorSpec(
        spec.gguf,
        spec.hf,
        (width, out),
        transform=lambda values: np.ascontiguousarray(values.T),
        written=(out, width),
    )


def _gpt2_tensors(config: Config) -> Iterator[TensorSpec]:
    shape = _gpt2_shape(config)
    yield from Module("token_embd", "wte", ("vocab", "embd")).tensors(shape.sizes)
    yield TensorSpec("position_embd.weight", "wpe.weight", (shape.context, shape.width))
    layer = [
        _norm("attn_norm", "ln_1"),
        Module("attn_qkv", "attn.c_attn", ("qkv", "embd"), bias=True),
        Module("attn_output", "attn.c_proj", ("embd", "embd"), bias=True),
        _norm("ffn_norm", "ln_2"),
        Module("ffn_up", "mlp.c_fc", ("ff", "embd"), bias=True),
        Module("ffn_down", "mlp.c_proj", ("embd", "ff"), bias=True),
    ]
    tied = flag(config, "tie_word_embeddings", True)
    for spec in _all(shape, [], layer, tied):
        yield _columns(spec) if spec.gguf.startswith("blk.") else spec


# ---- GPT-J ----


def _gptj_shape(config: Config) -> _Shape:
    return _shape("gptj", config, "n_inner", ("n_positions", 2048))


def _gptj_metadata(config: Config) -> Metadata:
    shape = _gptj_shape(config)
    head = shape.width // shape.heads
    rotated = dimension(config, "rotary_dim", 64)
    if rotated % 2 or rotated > head:
        why = f"{rotated} of {head} dimensions of a head would be rotated"
        raise refuse("gptj", "rotary_dim", rotated, why)
    values = shape.metadata(config, config.get("activation_function", "gelu_new"))
    return values | {"rope.dimension_count": rotated}


def _gptj_tensors(config: Config) -> Iterator[TensorSpec]:
    layer = [
        _norm("attn_norm", "ln_1"),
        Module("attn_q", "attn.q_proj", ("embd", "embd")),
        Module("attn_k", "attn.k_proj", ("embd", "embd")),
        Module("attn_v", "attn.v_proj", ("embd", "embd")),
        Module("attn_output", "attn.out_proj", ("embd", "embd")),
        Module("ffn_up", "mlp.fc_in", ("ff", "embd"), bias=True),
        Module("ffn_down", "mlp.fc_out", ("embd", "ff"), bias=True),
    ]
    tied = flag(config, "tie_word_embeddings", False)
    embedding = Module("token_embd", "wte", ("vocab", "embd"))
    return _all(_gptj_shape(config), [embedding], layer, tied, bias=True)


# ---- BLOOM ----

_BLOOM_FIXED = (("apply_residual_connection_post_layernorm", False, "the residual is normalised"),)


def _bloom_shape(config: Config) -> _Shape:
    return _shape("bloom", config, "ffn_hidden_size", ("seq_length", 2048))


def _bloom_metadata(config: Config) -> Metadata:
    check_fixed("bloom", config, _BLOOM_FIXED)
    return _bloom_shape(config).metadata(config, None)


def _bloom_tensors(config: Config) -> Iterator[TensorSpec]:
    before = [
        Module("token_embd", "word_embeddings", ("vocab", "embd")),
        _norm("token_embd_norm", "word_embeddings_layernorm"),
    ]
    qkv = "self_attention.query_key_value"
    layer = [
        _norm("attn_norm", "input_layernorm"),
        Module("attn_qkv", qkv, ("qkv", "embd"), bias=True, reorder=grouped_by_projection),
        Module("attn_output", "self_attention.dense", ("embd", "embd"), bias=True),
        _norm("ffn_norm", "post_attention_layernorm"),
        Module("ffn_up", "mlp.dense_h_to_4h", ("ff", "embd"), bias=True),
        Module("ffn_down", "mlp.dense_4h_to_h", ("embd", "ff"), bias=True),
    ]
    return _all(_bloom_shape(config), before, layer, flag(config, "tie_word_embeddings", True))


# ---- Falcon ----

_FALCON_FIXED = (
    ("alibi", False, "attention falls with the distance (ALiBi)"),
    ("bias", False, "the projections have biases"),
    ("parallel_attn", True, "attention and MLP come one after the other"),
)


def _falcon_shape(config: Config) -> _Shape:
    return _shape("falcon", config, "ffn_hidden_size", ("max_position_embeddings", 2048))


def _falcon_kv_heads(config: Config) -> int:
    heads = _falcon_shape(config).heads
    if flag(config, "new_decoder_architecture", False):
        kv_heads = dimension(config, "num_kv_heads", heads)
        if heads % kv_heads:
            why = f"{heads} heads of Q cannot share them evenly"
            raise refuse("falcon", "num_kv_heads", kv_heads, why)
        return kv_heads
    return 1 if flag(config, "multi_query", True) else heads


def _falcon_metadata(config: Config) -> Metadata:
    check_fixed("falcon", config, _FALCON_FIXED)
    shape = _falcon_shape(config)
    return {
        **shape.metadata(config, config.get("activation", "gelu")),
        "attention.head_count_kv": _falcon_kv_heads(config),
        "rope.dimension_count": shape.width // shape.heads,
        **rope_metadata("falcon", config),
    }


def _falcon_tensors(config: Config) -> Iterator[TensorSpec]:
    shape = _falcon_shape(config)
    kv_heads = _falcon_kv_heads(config)

    def by_projection(values: Values) -> Values:
        """Rows of Q that share a key, of that key, of that value -> all Q, all K, all V."""
        groups = values.reshape(kv_heads, -1, shape.width // shape.heads, values.shape[-1])
        parts = groups[:, :-2], groups[:, -2], groups[:, -1]
        return np.concatenate([part.reshape(-1, values.shape[-1]) for part in parts])

    new = flag(config, "new_decoder_architecture", False)
    two = new and config.get("num_ln_in_parallel_attn") in (None, 2)
    norms = (
        [_norm("attn_norm", "ln_mlp"), _norm("attn_norm_2", "ln_attn")]
        if two
        else [_norm("attn_norm", "input_layernorm")]
    )
    layer = [
        *norms,
        Module("attn_output", "self_attention.dense", ("embd", "embd")),
        Module("ffn_up", "mlp.dense_h_to_4h", ("ff", "embd")),
        Module("ffn_down", "mlp.dense_4h_to_h", ("embd", "ff")),
    ]
    embedding = Module("token_embd", "word_embeddings", ("vocab", "embd"))
    yield from _all(shape, [embedding], layer, flag(config, "tie_word_embeddings", True))
    rows = (shape.heads + 2 * kv_heads) * (shape.width // shape.heads)
    for i in range(shape.layers):
        yield TensorSpec(
            f"blk.{i}.attn_qkv.weight",
            f"h.{i}.self_attention.query_key_value.weight",
            (rows, shape.width),
            transform=by_projection,
        )


# The head of a tied checkpoint repeats the embedding; old checkpoints hold causal masks.
_IGNORED = re.compile(r"lm_head\.weight|h\.\d+\.attn\.(bias|masked_bias|embed_positions)")
_PREFIX = "transformer."

GPT2 = Family("gpt2", _PREFIX, _gpt2_metadata, _gpt2_tensors, _IGNORED)
GPTJ = Family("gptj", _PREFIX, _gptj_metadata, _gptj_tensors, _IGNORED)
BLOOM = Family("bloom", _PREFIX, _bloom_metadata, _bloom_tensors, _IGNORED)
FALCON = Family("falcon", _PREFIX, _falcon_metadata, _falcon_tensors, _IGNORED)
