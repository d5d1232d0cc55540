"""The OPT family (Zhang et al. 2022, `OPTForCausalLM`) as GGUF architecture `opt`.

ggml has no official `opt`; the names are those of its forks (SparkInfer, llama.cpp PR 13799).
"""

from collections.abc import Iterator
from typing import NamedTuple

from h2o_cpp.convert.checkpoint import Config, dimension
from h2o_cpp.convert.family import Family, TensorSpec

_LAYER_NORM_EPSILON = 1e-5  # PyTorch's default; OPT's config.json has no key for it
_POSITION_OFFSET = 2  # HF looks position p up in row p + 2; rows 0 and 1 are never used


class _Module(NamedTuple):
    """A module with a weight; `shape` names the config.json keys of the weight's dimensions."""

    gguf: str
    hf: str
    shape: tuple[str, ...]


_EMBEDDING = _Module("token_embd", "decoder.embed_tokens", ("vocab_size", "hidden_size"))
_HEAD = _Module("output", "lm_head", ("vocab_size", "hidden_size"))
_OUTPUT_NORM = _Module("output_norm", "decoder.final_layer_norm", ("hidden_size",))
_LAYER = (
    _Module("attn_norm", "self_attn_layer_norm", ("hidden_size",)),
    _Module("attn_q", "self_attn.q_proj", ("hidden_size", "hidden_size")),
    _Module("attn_k", "self_attn.k_proj", ("hidden_size", "hidden_size")),
    _Module("attn_v", "self_attn.v_proj", ("hidden_size", "hidden_size")),
    _Module("attn_output", "self_attn.out_proj", ("hidden_size", "hidden_size")),
    _Module("ffn_norm", "final_layer_norm", ("hidden_size",)),
    _Module("ffn_up", "fc1", ("ffn_dim", "hidden_size")),
    _Module("ffn_down", "fc2", ("hidden_size", "ffn_dim")),
)

# config.json key, the one value (also HF's default) that `opt` files can express, what else means
_FIXED = (
    ("do_layer_norm_before", True, "the layer norms come after attention and MLP, as in opt-350m"),
    ("_remove_final_layer_norm", False, "there is no layer norm before the head"),
    ("activation_function", "relu", "the MLP does not use ReLU"),
    ("enable_bias", True, "the projections have no biases"),
    ("layer_norm_elementwise_affine", True, "the layer norms have no weights"),
)


def _refuse(key: str, value: object, why: str) -> ValueError:
    return ValueError(f"config.json: {key} is {value!r}: {why}; an `opt` file cannot express this")


def _metadata(config: Config) -> dict[str, int | float]:
    for key, expected, why in _FIXED:
        value = config.get(key, expected)
        if value != expected:
            raise _refuse(key, value, why)
    width = dimension(config, "hidden_size")
    heads = dimension(config, "num_attention_heads")
    projected = config.get("word_embed_proj_dim", width)
    if projected != width:
        raise _refuse(
            "word_embed_proj_dim", projected, f"embeddings are projected to hidden_size {width}"
        )
    if width % heads:
        raise _refuse(
            "num_attention_heads", heads, f"the heads do not divide hidden_size {width} evenly"
        )
    return {
        "context_length": dimension(config, "max_position_embeddings"),
        "embedding_length": width,
        "block_count": dimension(config, "num_hidden_layers"),
        "feed_forward_length": dimension(config, "ffn_dim"),
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "attention.layer_norm_epsilon": _LAYER_NORM_EPSILON,
        "vocab_size": dimension(config, "vocab_size"),
    }


def _tensors(config: Config) -> Iterator[TensorSpec]:
    def weight(module: _Module) -> TensorSpec:
        shape = tuple(dimension(config, key) for key in module.shape)
        return TensorSpec(f"{module.gguf}.weight", f"{module.hf}.weight", shape)

    def weight_and_bias(module: _Module) -> Iterator[TensorSpec]:
        yield weight(module)
        rows = dimension(config, module.shape[0])
        yield TensorSpec(f"{module.gguf}.bias", f"{module.hf}.bias", (rows,))

    yield weight(_EMBEDDING)
    yield TensorSpec(
        "position_embd.weight",
        "decoder.embed_positions.weight",
        (
            _POSITION_OFFSET + dimension(config, "max_position_embeddings"),
            dimension(config, "hidden_size"),
        ),
        skip_rows=_POSITION_OFFSET,
    )
    for i in range(dimension(config, "num_hidden_layers")):
        for gguf, hf, shape in _LAYER:
            yield from weight_and_bias(
                _Module(f"blk.{i}.{gguf}", f"decoder.layers.{i}.{hf}", shape)
            )
    yield from weight_and_bias(_OUTPUT_NORM)
    if not config.get("tie_word_embeddings", True):
        yield weight(_HEAD)


OPT = Family(
    architecture="opt",
    base_prefix="model.",
    metadata=_metadata,
    tensors=_tensors,
    # The head of a tied checkpoint repeats the embedding; fairseq left a version number behind.
    ignored=frozenset({"lm_head.weight", "decoder.version"}),
    add_bos=True,
    control_tokens=frozenset({"<s>", "<pad>", "</s>", "<unk>"}),
)
