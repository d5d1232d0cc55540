"""Gemma 4 (`gemma4`): layers with a window and others differ in their heads.

Sizes of layers without a window are in config.json as global_*, or in per_layer_config. The last
layers of small models read the keys and values of earlier ones, and their layers have embeddings of
their own. In the large mixture, a layer has experts beside its MLP.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from h2o_cpp.convert.config import Config, Metadata, dimension, flag, number, refuse
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.modules import Module, Sizes, TensorSpec, count, gated_mlp
from h2o_cpp.convert.rope import rope_of_windows
from h2o_cpp.convert.window import sliding_layers

_ROPE = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _slides(config: Config) -> list[bool]:
    """Which layers have a window: by default all but the last of six, and never the last."""
    if config.get("layer_types") is not None:
        slides = sliding_layers(config)
    else:
        slides = [(i + 1) % 6 != 0 for i in range(dimension(config, "num_hidden_layers"))]
    return [*slides[:-1], False]


def _of_full_layers(config: Config, key: str, old_key: str, default: int) -> int:
    """A size of the layers without a window, which is the same for all of them."""
    if (listed := config.get("per_layer_config")) is None:
        return dimension(config, old_key, default)
    full = {str(i) for i, slides in enumerate(_slides(config)) if not slides}
    if not isinstance(listed, dict) or set(listed) != full:
        why = "other layers than those without a window have sizes of their own"
        raise refuse("gemma4", "per_layer_config", listed, why)
    layers: list[Any] = list(listed.values())
    return dimension({key: [layer.get(key, config.get(key)) for layer in layers]}, key, default)


def _more_sizes(config: Config) -> Sizes:
    heads, kv_heads = (
        dimension(config, f"num_{kind}_heads") for kind in ("attention", "key_value")
    )
    head = _of_full_layers(config, "head_dim", "global_head_dim", 512)
    # The number differs only where keys are values.
    own = flag(config, "attention_k_eq_v", False)
    key = "num_global_key_value_heads" if own else "num_key_value_heads"
    kv = _of_full_layers(config, "num_key_value_heads", key, kv_heads)
    sizes = {"full_head": head, "full_kv_heads": kv, "full_q": heads * head, "full_kv": kv * head}
    wide = 2 if flag(config, "use_double_wide_mlp", False) else 1
    sizes["wide_ff"] = wide * dimension(config, "intermediate_size")
    if n := _n_layer_embd(config):
        vocab = dimension(config, "vocab_size")
        given = dimension(config, "vocab_size_per_layer_input", 262144)
        if given != vocab:
            why = "the table of embeddings of layers has other tokens"
            raise refuse("gemma4", "vocab_size_per_layer_input", given, why)
        sizes |= {"layer_embd": n, "layers_embd": n * dimension(config, "num_hidden_layers")}
    if _has_experts(config):
        ff = dimension(config, "moe_intermediate_size")
        n_experts = dimension(config, "num_experts")
        sizes |= {"experts": n_experts, "expert_ff": ff, "expert_both": 2 * ff}
    return sizes


def _has_experts(config: Config) -> bool:
    return flag(config, "enable_moe_block", False)


def _n_layer_embd(config: Config) -> int:
    return count(config, "hidden_size_per_layer_input")


def _n_readers(config: Config) -> int:
    """How many layers, the last ones, read the keys and values of others."""
    return count(config, "num_kv_shared_layers")


def _reads(config: Config, index: int) -> bool:
    return index >= dimension(config, "num_hidden_layers") - _n_readers(config)


def _details(config: Config, sizes: Sizes) -> Metadata:
    activation = config.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        why = "the MLP does not use GELU's form with tanh"
        raise refuse("gemma4", "hidden_activation", activation, why)
    key = "use_bidirectional_attention"
    if config.get(key) not in (None, False, "vision"):
        raise refuse("gemma4", key, config[key], "tokens attend to later ones")
    slides = _slides(config)
    values: Metadata = {
        "attention.head_count_kv": [
            sizes["kv_heads" if sliding else "full_kv_heads"] for sliding in slides
        ],
        "attention.key_length": sizes["full_head"],
        "attention.value_length": sizes["full_head"],
        "attention.key_length_swa": sizes["head"],
        "attention.value_length_swa": sizes["head"],
        "attention.sliding_window": dimension(config, "sliding_window", 512),
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": _n_readers(config),
        "embedding_length_per_layer_input": _n_layer_embd(config),
        "rope.dimension_count_swa": sizes["head"],
        **rope_of_windows("gemma4", config),
    }
    if sizes["wide_ff"] != sizes["ff"]:
        values["feed_forward_length"] = [
            sizes["wide_ff" if _reads(config, i) else "ff"] for i in range(len(slides))
        ]
    if _has_experts(config):
        used = dimension(config, "top_k_experts")
        if used > sizes["experts"]:
            raise ValueError(
                f"config.json: top_k_experts is {used}, but there are {sizes['experts']} experts"
            )
        values["expert_count"], values["expert_used_count"] = sizes["experts"], used
        values["expert_feed_forward_length"] = sizes["expert_ff"]
    if config.get("final_logit_softcapping") is not None:
        values["final_logit_softcapping"] = number(config, "final_logit_softcapping")
    return values


def _layer(config: Config, index: int) -> Iterator[Module]:
    sliding = _slides(config)[index]
    q, kv, head = ("q", "kv", "head") if sliding else ("full_q", "full_kv", "full_head")
    yield Module("attn_norm", "input_layernorm", ("embd",))
    yield Module("attn_q", "self_attn.q_proj", (q, "embd"))
    yield Module("attn_q_norm", "self_attn.q_norm", (head,))
    if not _reads(config, index):
        yield Module("attn_k", "self_attn.k_proj", (kv, "embd"))
        yield Module("attn_k_norm", "self_attn.k_norm", (head,))
        if sliding or not flag(config, "attention_k_eq_v", False):
            yield Module("attn_v", "self_attn.v_proj", (kv, "embd"))
    yield Module("attn_output", "self_attn.o_proj", ("embd", q))
    yield Module("post_attention_norm", "post_attention_layernorm", ("embd",))
    yield Module("ffn_norm", "pre_feedforward_layernorm", ("embd",))
    yield from gated_mlp("mlp", size="wide_ff" if _reads(config, index) else "ff")
    yield Module("post_ffw_norm", "post_feedforward_layernorm", ("embd",))
    if _has_experts(config):
        yield Module("ffn_gate_inp", "router.proj", ("experts", "embd"))
        yield Module("pre_ffw_norm_2", "pre_feedforward_layernorm_2", ("embd",))
        yield Module("post_ffw_norm_1", "post_feedforward_layernorm_1", ("embd",))
        yield Module("post_ffw_norm_2", "post_feedforward_layernorm_2", ("embd",))
    if _n_layer_embd(config):
        yield Module("inp_gate", "per_layer_input_gate", ("layer_embd", "embd"))
        yield Module("proj", "per_layer_projection", ("embd", "layer_embd"))
        yield Module("post_norm", "post_per_layer_input_norm", ("embd",))


# Names in the file and in the checkpoint, where one is not that of a weight; shapes.
_SCALE = ("layer_output_scale.weight", "layer_scalar", ("one",))
_EXPERTS = (
    ("ffn_gate_inp.scale", "router.scale", ("embd",)),
    ("ffn_gate_up_exps.weight", "experts.gate_up_proj", ("experts", "expert_both", "embd")),
    ("ffn_down_exps.weight", "experts.down_proj", ("experts", "embd", "expert_ff")),
    ("ffn_down_exps.scale", "router.per_expert_scale", ("experts",)),
)
_LAYER_EMBEDDINGS = (
    Module("per_layer_token_embd", "embed_tokens_per_layer", ("vocab", "layers_embd")),
    Module("per_layer_model_proj", "per_layer_model_projection", ("layers_embd", "embd")),
    Module("per_layer_proj_norm", "per_layer_projection_norm", ("layer_embd",)),
)


def _more_tensors(config: Config, index: int, sizes: Sizes) -> Iterator[TensorSpec]:
    for gguf, hf, shape in (_SCALE, *(_EXPERTS if _has_experts(config) else ())):
        sized = tuple(sizes[name] for name in shape)
        yield TensorSpec(f"blk.{index}.{gguf}", f"layers.{index}.{hf}", sized)
    if index == 0 and _n_layer_embd(config):
        for module in _LAYER_EMBEDDINGS:
            yield from module.tensors(sizes)


GEMMA4 = Family(
    architecture="gemma4",
    layer=_layer,
    fixed=(("attention_bias", False, "the attention has biases"),),
    details=_details,
    epsilon=("rms_norm_eps", 1e-6),
    rms=True,
    rotated=lambda config, sizes: sizes["full_head"],
    tied=True,
    more_sizes=_more_sizes,
    more_tensors=_more_tensors,
    # Layers that read others' keys and values may have them.
    ignored=re.compile(r"layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight"),
    visible_tokens=frozenset(
        (
            *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
            *("<|tool_response>", "<tool_response|>", '<|"|>'),
        )
    ),
    piece_merges=True,
    absent={
        "rope_parameters": _ROPE,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size_per_layer_input": 256,
        "max_position_embeddings": 131072,
        "vocab_size": 262144,
    },
)

_UNIFIED = replace(
    GEMMA4,
    absent={
        **GEMMA4.absent,
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
    },
)

FAMILIES = {
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Gemma4UnifiedForCausalLM": _UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": _UNIFIED,
}
