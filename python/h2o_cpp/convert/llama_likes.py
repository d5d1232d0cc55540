"""Families like Llama with a part of their own, or with other names of tensors.

Hunyuan is GGUF architecture `hunyuan-dense` and `hunyuan-moe`, Apertus `apertus`, OLMo 1 `olmo`,
Baichuan `baichuan`, InternLM 2 `internlm2` and 3 `llama`, MiniCPM `minicpm`, EXAONE 3 `exaone`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from h2o_cpp.convert.checkpoint import SourceTensor, Values
from h2o_cpp.convert.config import Config, Metadata, dimension, number
from h2o_cpp.convert.llama_layout import LlamaLayout, pairs_from_halves
from h2o_cpp.convert.modules import HEAD, Mixture, Module, Sizes, TensorSpec, gated_mlp, qkv

# ---- Hunyuan ----

_HUNYUAN = LlamaLayout(
    "hunyuan-dense",
    attention=(
        *qkv(),
        Module("attn_q_norm", "self_attn.query_layernorm", ("head",)),
        Module("attn_k_norm", "self_attn.key_layernorm", ("head",)),
        Module("attn_output", "self_attn.o_proj", ("embd", "q")),
    ),
    fixed=(("use_cla", False, "layers share keys and values"),),
    absent={"rms_norm_eps": 1e-5},
)
_HUNYUAN_MOE = _HUNYUAN._replace(
    architecture="hunyuan-moe",
    mixture=Mixture(
        router="mlp.gate.wg",
        normalized=True,
        says_normalized=False,
        n_shared="num_shared_expert",
        shared_mlp="mlp.shared_mlp",
        says_shared_ff=True,
    ),
    absent={"rms_norm_eps": 1e-5, "num_shared_expert": 1},
)

# ---- Apertus ----

_XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def _xielu(tensors: Mapping[str, SourceTensor], n_layers: int) -> Metadata:
    """The parameters of each layer's activation, which files have as metadata."""

    def value(layer: int, name: str) -> float:
        hf = f"layers.{layer}.mlp.act_fn.{name}"
        source = tensors.get(f"model.{hf}", tensors.get(hf))
        if source is None or source.read is None:
            raise ValueError(f"tensor {hf} is missing from the checkpoint")
        return float(source.read().item())

    return {f"xielu.{name}": [value(i, name) for i in range(n_layers)] for name in _XIELU}


_APERTUS = replace(
    LlamaLayout(
        "apertus",
        qk_norm="heads",
        activation="xielu",
        norms={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        absent={"rms_norm_eps": 1e-5, "rope_theta": 12e6, "hidden_act": "xielu"},
        ignored=re.compile(r"layers\.\d+\.mlp\.act_fn\.\w+"),
    ).family(),
    of_weights=_xielu,
)

# ---- OLMo 1 ----


def _olmo(config: Config) -> Metadata:
    key = "clip_qkv"
    return {} if config.get(key) is None else {"attention.clamp_kqv": number(config, key)}


_OLMO = replace(
    LlamaLayout("olmo", rotates_pairs=True, norms={}, more=_olmo).family(),
    epsilon=("layer_norm_eps", 1e-5),
    rms=False,
    output_norm=None,
)

# ---- Baichuan ----

_BAICHUAN_2 = 125_696  # tokens


def _norm_head(values: Values, head_size: int) -> Values:
    """The head, whose rows Baichuan 2 normalizes before it is used."""
    if len(values) != _BAICHUAN_2:
        return values
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    normalized: Values = values / np.maximum(lengths, np.float32(1e-12))
    return normalized


_PACK, _PACK_SHAPE = "self_attn.W_pack", ("qkv", "embd")
_BAICHUAN = replace(
    LlamaLayout(
        "baichuan",
        attention=(
            Module("attn_q", _PACK, _PACK_SHAPE, rows=("none", "q"), reorder=pairs_from_halves),
            Module("attn_k", _PACK, _PACK_SHAPE, rows=("q", "q_and_k"), reorder=pairs_from_halves),
            Module("attn_v", _PACK, _PACK_SHAPE, rows=("q_and_k", "qkv")),
            Module("attn_output", "self_attn.o_proj", ("embd", "q")),
        ),
    ).family(),
    head=HEAD._replace(reorder=_norm_head),
)

# ---- InternLM ----


def _internlm2_qkv(config: Config, index: int, sizes: Sizes) -> Iterator[TensorSpec]:
    """Q, K and V from one tensor that holds the queries, the key and the value of each KV head."""
    head, groups, width = sizes["head"], sizes["kv_heads"], sizes["embd"]

    def part(choose: slice, rotated: bool) -> Callable[[Values], Values]:
        def chosen(values: Values) -> Values:
            rows = values.reshape(groups, -1, head, width)[:, choose].reshape(-1, width)
            return pairs_from_halves(rows, head) if rotated else rows

        return chosen

    for gguf, size, choose, rotated in (
        ("attn_q", "q", slice(-2), True),
        ("attn_k", "kv", slice(-2, -1), True),
        ("attn_v", "kv", slice(-1, None), False),
    ):
        yield TensorSpec(
            f"blk.{index}.{gguf}.weight",
            f"layers.{index}.attention.wqkv.weight",
            (sizes["qkv"], width),
            transform=part(choose, rotated),
            written=(sizes[size], width),
        )


_INTERNLM2 = replace(
    LlamaLayout(
        "internlm2",
        rotates_pairs=True,
        embedding="tok_embeddings",
        attention=(Module("attn_output", "attention.wo", ("embd", "q")),),
        norms={"attn_norm": "attention_norm", "ffn_norm": "ffn_norm"},
        mlp=gated_mlp("feed_forward", ("w1", "w3", "w2")),
        fixed=(("bias", False, "there are biases"),),
    ).family(),
    head=HEAD._replace(hf="output"),
    more_tensors=_internlm2_qkv,
)
_INTERNLM3 = LlamaLayout(
    "llama",
    rotates_pairs=True,
    fixed=(("qkv_bias", False, "there are biases"), ("bias", False, "there are biases")),
    absent={"rms_norm_eps": 1e-5},
)

# ---- MiniCPM ----


def minicpm_scales(config: Config) -> Metadata:
    """The multipliers of MiniCPM."""
    depth = dimension(config, "num_hidden_layers")
    width = dimension(config, "hidden_size")
    return {
        "embedding_scale": number(config, "scale_emb", 1.0),
        "residual_scale": number(config, "scale_depth", 1.0) / depth**0.5,
        "logit_scale": width / number(config, "dim_model_base", 1.0),
    }


_MINICPM = LlamaLayout(
    "minicpm",
    rotates_pairs=True,
    fixed=(("num_experts", 0, "there are experts"),),
    more=minicpm_scales,
    tied=True,
)

# ---- EXAONE 3 ----

_EXAONE_LAYOUT = LlamaLayout(
    "exaone",
    embedding="wte",
    attention=(
        *(module._replace(hf=module.hf.replace("self_attn", "attn.attention")) for module in qkv()),
        Module("attn_output", "attn.attention.out_proj", ("embd", "q")),
    ),
    norms={"attn_norm": "ln_1", "ffn_norm": "ln_2"},
    mlp=gated_mlp("mlp", ("c_fc_0", "c_fc_1", "c_proj")),
    fixed=(("activation_function", "silu", "the MLP does not use SiLU"),),
)
_EXAONE = replace(
    _EXAONE_LAYOUT.family(),
    epsilon=("layer_norm_epsilon", 1e-5),
    base_prefix="transformer.",
    layers="h",
    output_norm=Module("output_norm", "ln_f", ("embd",)),
)

FAMILIES = {
    "HunYuanDenseV1ForCausalLM": _HUNYUAN.family(),
    "HunYuanMoEV1ForCausalLM": _HUNYUAN_MOE.family(),
    "ApertusForCausalLM": _APERTUS,
    "OlmoForCausalLM": _OLMO,
    "BaichuanForCausalLM": _BAICHUAN,
    "BaiChuanForCausalLM": _BAICHUAN,
    "InternLM2ForCausalLM": _INTERNLM2,
    "InternLM3ForCausalLM": _INTERNLM3.family(),
    "MiniCPMForCausalLM": _MINICPM.family(),
    "ExaoneForCausalLM": _EXAONE,
}
