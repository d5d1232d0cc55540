"""Qwen3.5, dense (`qwen35`) and with experts (`qwen35moe`), and Qwen3-Next (`qwen3next`).

Most layers are Gated DeltaNet, a linear attention; the others are attention with a gated output.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, Metadata, dimension, layer_flags, refuse
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.modules import (
    EVERY_LAYER,
    SHARED_EXPERT,
    Mixture,
    Module,
    Sizes,
    TensorSpec,
    gated_mlp,
    negative_exp,
    separate_predictor,
    without_channels,
)
from h2o_cpp.convert.rope import rope_sections, rotated_share

_NAME = "qwen35"
_KINDS = {"linear_attention": True, "full_attention": False}
_SECTIONS = [11, 11, 10]  # of M-RoPE, if config.json has none

_norm = partial(Module, add=1.0)

_ATTENTION = (
    Module("attn_q", "self_attn.q_proj", ("q_and_gate", "embd")),  # alternating by head
    Module("attn_k", "self_attn.k_proj", ("kv", "embd")),
    Module("attn_v", "self_attn.v_proj", ("kv", "embd")),
    _norm("attn_q_norm", "self_attn.q_norm", ("head",)),
    _norm("attn_k_norm", "self_attn.k_norm", ("head",)),
    Module("attn_output", "self_attn.o_proj", ("embd", "q")),
)
_MLP = gated_mlp("mlp")
_SHARED = (Module("ffn_gate_inp", "mlp.gate", ("experts", "embd")), *SHARED_EXPERT)


class _Heads(NamedTuple):
    """The heads of Gated DeltaNet: n_k of Q and of K, n_v of V, all of the same size."""

    n_k: int
    n_v: int
    size: int

    @staticmethod
    def of(config: Config) -> "_Heads":
        """Raises ValueError if V's heads have another size or cannot share those of K."""
        n_k, n_v = (dimension(config, f"linear_num_{part}_heads") for part in ("key", "value"))
        size, v_size = (dimension(config, f"linear_{part}_head_dim") for part in ("key", "value"))
        if v_size != size:
            why = f"the heads of V are not as large as those of K ({size})"
            raise refuse(_NAME, "linear_value_head_dim", v_size, why)
        if n_v % n_k:
            why = f"they cannot share {n_k} heads of K evenly"
            raise refuse(_NAME, "linear_num_value_heads", n_v, why)
        return _Heads(n_k, n_v, size)

    def in_turn(self, values: Values, axis: int = 0) -> Values:
        """Reorder the heads of V along an axis.

        In the checkpoint, those that share a head of K are adjacent; in the file, head i of V has
        head i % n_k of K.
        """
        before, after = values.shape[:axis], values.shape[axis + 1 :]
        grouped = values.reshape(*before, self.n_k, self.n_v // self.n_k, -1, *after)
        return np.reshape(grouped.swapaxes(axis, axis + 1), values.shape)

    def v_in_turn(self, values: Values) -> Values:
        """Reorder the rows of V after those of Q and K."""
        q_and_k, v = np.split(values, [2 * self.n_k * self.size])
        return np.concatenate([q_and_k, self.in_turn(v)])

    def sizes(self) -> Sizes:
        """The sizes in the shapes of the modules."""
        k, v = self.n_k * self.size, self.n_v * self.size
        sizes = {"linear_qkv": 2 * k + v, "linear_v": v, "v_heads": self.n_v, "v_head": self.size}
        return {**sizes, "gates": 2 * self.n_v}


def _delta_net(config: Config) -> Iterator[Module]:
    heads = _Heads.of(config)

    def rows(values: Values, _: int) -> Values:
        return heads.in_turn(values)

    def rows_of_v(values: Values, _: int) -> Values:
        return heads.v_in_turn(values)

    def columns(values: Values, _: int) -> Values:
        return heads.in_turn(values, axis=1)

    hf = "linear_attn"
    yield Module("attn_qkv", f"{hf}.in_proj_qkv", ("linear_qkv", "embd"), reorder=rows_of_v)
    yield Module("attn_gate", f"{hf}.in_proj_z", ("linear_v", "embd"), reorder=rows)
    yield Module("ssm_beta", f"{hf}.in_proj_b", ("v_heads", "embd"), reorder=rows)
    yield Module("ssm_alpha", f"{hf}.in_proj_a", ("v_heads", "embd"), reorder=rows)
    yield Module("ssm_norm", f"{hf}.norm", ("v_head",))
    yield Module("ssm_out", f"{hf}.out_proj", ("embd", "linear_v"), reorder=columns)


def _delta_net_parameters(
    config: Config, index: int, sizes: Sizes, in_turn: bool = True
) -> Iterator[TensorSpec]:
    """The tensors of Gated DeltaNet that are not a module, in the layers that have it.

    in_turn: whether the heads of V are reordered.
    """
    if not _linear_layers(config)[index]:
        return
    heads, blk, hf = _Heads.of(config), f"blk.{index}", f"layers.{index}.linear_attn"
    n_heads, n_channels, n_taps = sizes["v_heads"], sizes["linear_qkv"], _taps(config)

    def per_head(values: Values) -> Values:
        return heads.in_turn(values) if in_turn else values

    def decay(a_log: Values) -> Values:
        return negative_exp(per_head(a_log))

    def taps(values: Values) -> Values:
        weights = without_channels(values)
        return heads.v_in_turn(weights) if in_turn else weights

    yield TensorSpec(f"{blk}.ssm_a", f"{hf}.A_log", (n_heads,), transform=decay)
    yield TensorSpec(f"{blk}.ssm_dt.bias", f"{hf}.dt_bias", (n_heads,), transform=per_head)
    yield TensorSpec(
        f"{blk}.ssm_conv1d.weight",
        f"{hf}.conv1d.weight",
        (n_channels, 1, n_taps),
        transform=taps,
        written=(n_channels, n_taps),
    )


def _experts(index: int, sizes: Sizes) -> Iterator[TensorSpec]:
    """One tensor per expert; Qwen has one of all, as transformers 5."""
    n, embd, ff = sizes["experts"], sizes["embd"], sizes["expert_ff"]
    hf = f"layers.{index}.mlp.experts"
    for part, shape in (("gate", (ff, embd)), ("up", (ff, embd)), ("down", (embd, ff))):
        gguf = f"blk.{index}.ffn_{part}_exps.weight"
        yield TensorSpec(gguf, f"{hf}.{{}}.{part}_proj.weight", shape, stack=n)


def _taps(config: Config) -> int:
    return dimension(config, "linear_conv_kernel_dim")


def _linear_layers(config: Config) -> list[bool]:
    """Which layers are Gated DeltaNet, by layer_types or else by full_attention_interval."""
    if config.get("layer_types") is not None:
        return layer_flags(config, _KINDS)
    interval = dimension(config, "full_attention_interval", 4)
    return [(i + 1) % interval != 0 for i in range(dimension(config, "num_hidden_layers"))]


def _kinds_of_layers(config: Config) -> Metadata:
    """The interval of layers with attention, or which ones have none if there is no interval."""
    linear = _linear_layers(config)
    interval = (*linear, False).index(False) + 1
    if linear == [(i + 1) % interval != 0 for i in range(len(linear))]:
        return {"full_attention_interval": interval}
    return {"attention.recurrent_layers": linear}


def _details(config: Config, sizes: Sizes) -> Metadata:
    heads = _Heads.of(config)
    return {
        "ssm.conv_kernel": _taps(config),
        "ssm.state_size": heads.size,
        "ssm.group_count": heads.n_k,
        "ssm.time_step_rank": heads.n_v,
        "ssm.inner_size": sizes["linear_v"],
        **_kinds_of_layers(config),
    }


def _layer(
    config: Config, index: int, delta_net: Iterable[Module], mlp: Iterable[Module]
) -> Iterator[Module]:
    yield _norm("attn_norm", "input_layernorm", ("embd",))
    yield from delta_net if _linear_layers(config)[index] else _ATTENTION
    yield _norm("post_attention_norm", "post_attention_layernorm", ("embd",))
    yield from mlp


def _predicting_layer(_config: Config) -> Iterator[Module]:
    """The layer for multi-token prediction, which has attention."""
    yield from _ATTENTION
    yield _norm("attn_norm", "input_layernorm", ("embd",))
    yield _norm("post_attention_norm", "post_attention_layernorm", ("embd",))
    yield from _MLP


QWEN35 = Family(
    architecture=_NAME,
    layer=lambda config, index: _layer(config, index, _delta_net(config), _MLP),
    fixed=(
        ("hidden_act", "silu", "the MLP does not use SiLU"),
        ("attention_bias", False, "the attention has biases"),
        ("attn_output_gate", True, "the output of attention has no gate"),
    ),
    details=lambda config, sizes: _details(config, sizes) | rope_sections(config, _SECTIONS),
    epsilon=("rms_norm_eps", 1e-6),
    rms=True,
    rotated=lambda config, sizes: rotated_share(_NAME, config, sizes["head"], 0.25),
    output_norm=_norm("output_norm", "norm", ("embd",)),
    more_sizes=lambda config: _Heads.of(config).sizes(),
    more_tensors=_delta_net_parameters,
    predictor=separate_predictor(_predicting_layer, add=1.0),
    ignored=re.compile(r"mtp\..*"),  # further layers, and that of mixtures
    absent={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
)


def _all_tensors(config: Config, index: int, sizes: Sizes) -> Iterator[TensorSpec]:
    yield from _delta_net_parameters(config, index, sizes)
    yield from _experts(index, sizes)


QWEN35_MOE = replace(
    QWEN35,
    architecture=f"{_NAME}moe",
    fixed=(*QWEN35.fixed, *EVERY_LAYER),
    layer=lambda config, index: _layer(config, index, _delta_net(config), _SHARED),
    has_mlp=False,
    predictor=None,
    more_tensors=_all_tensors,
    mixture=Mixture(says_normalized=False, shared=True),  # always normalized
    absent={
        **QWEN35.absent,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)


_NEXT_DELTA_NET = (
    Module("ssm_ba", "linear_attn.in_proj_ba", ("gates", "embd")),
    Module("ssm_norm", "linear_attn.norm", ("v_head",)),
    Module("ssm_out", "linear_attn.out_proj", ("embd", "linear_v")),
)


def _next_tensors(config: Config, index: int, sizes: Sizes) -> Iterator[TensorSpec]:
    """Q, K, V and the gate, which the checkpoint has by head of K; and what is not a module."""
    if _linear_layers(config)[index]:
        heads, embd = _Heads.of(config), sizes["embd"]
        group = heads.n_v // heads.n_k * heads.size  # rows of V that share a head of K
        hf = f"layers.{index}.linear_attn.in_proj_qkvz.weight"
        shape = (sizes["linear_qkv"] + sizes["linear_v"], embd)

        def parts(first: int, end: int) -> Callable[[Values], Values]:
            """Select some of Q, K, V and the gate."""

            def chosen(values: Values) -> Values:
                by_head = values.reshape(heads.n_k, -1, embd)
                parts = np.split(by_head, np.cumsum([heads.size, heads.size, group]), axis=1)
                return np.concatenate([part.reshape(-1, embd) for part in parts[first:end]])

            return chosen

        qkv_shape, gate_shape = (sizes["linear_qkv"], embd), (sizes["linear_v"], embd)
        yield TensorSpec(
            f"blk.{index}.attn_qkv.weight", hf, shape, transform=parts(0, 3), written=qkv_shape
        )
        yield TensorSpec(
            f"blk.{index}.attn_gate.weight", hf, shape, transform=parts(3, 4), written=gate_shape
        )
        yield from _delta_net_parameters(config, index, sizes, in_turn=False)
    yield from _experts(index, sizes)


QWEN3_NEXT = replace(
    QWEN35_MOE,
    architecture="qwen3next",
    fixed=(
        *QWEN35_MOE.fixed,
        ("norm_topk_prob", True, "the weights of a token's experts do not sum to 1"),
    ),
    layer=lambda config, index: _layer(config, index, _NEXT_DELTA_NET, _SHARED),
    details=_details,
    more_tensors=_next_tensors,
    absent={**QWEN35_MOE.absent, "num_experts": 512, "num_experts_per_tok": 10},
)

FAMILIES = {
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN35,
    "Qwen3_5ForConditionalGeneration": QWEN35,
    "Qwen3_5MoeForCausalLM": QWEN35_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN35_MOE,
}
