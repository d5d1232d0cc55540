"""Families with layer norms and rotary positions: StarCoder2, StableLM, Phi-1 and 2, Phi-3.5-MoE,
Nemotron, Command-R, R7B and A.
"""

from collections.abc import Iterator
from dataclasses import replace

from h2o_cpp.convert.config import Config, Fixed, Metadata, flag, number
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.gpt import gelu_form
from h2o_cpp.convert.modules import HEAD, MIXTRAL_EXPERTS, Module, Sizes, gated_mlp, qkv
from h2o_cpp.convert.rope import rotated_share
from h2o_cpp.convert.window import window_of_every_layer, window_of_pattern


def _attention(qkv_bias: bool, output_bias: bool) -> Iterator[Module]:
    yield from qkv(qkv_bias)
    yield Module("attn_output", "self_attn.o_proj", ("embd", "q"), output_bias)


_OUTPUT_NORM = Module("output_norm", "norm", ("embd",), bias=True)


_STARCODER2_LAYER = (
    Module("attn_norm", "input_layernorm", ("embd",), True),
    *_attention(True, True),
    Module("ffn_norm", "post_attention_layernorm", ("embd",), True),
    Module("ffn_up", "mlp.c_fc", ("ff", "embd"), True),
    Module("ffn_down", "mlp.c_proj", ("embd", "ff"), True),
)
STARCODER2 = Family(
    architecture="starcoder2",
    layer=lambda config, index: _STARCODER2_LAYER,
    fixed=(
        ("hidden_act", "gelu_pytorch_tanh", "the MLP does not use GELU's form with tanh"),
        ("use_bias", True, "the projections have no biases"),
    ),
    details=lambda config, sizes: window_of_every_layer(config),
    epsilon=("norm_epsilon", 1e-5),
    output_norm=_OUTPUT_NORM,
    tied=True,
)


def _stablelm_layer(config: Config, index: int) -> Iterator[Module]:
    yield Module("attn_norm", "input_layernorm", ("embd",), True)
    yield from _attention(flag(config, "use_qkv_bias", False), False)
    if not flag(config, "use_parallel_residual", False):
        yield Module("ffn_norm", "post_attention_layernorm", ("embd",), True)
    yield from gated_mlp("mlp")


def _stablelm_details(config: Config, sizes: Sizes) -> Metadata:
    return {"use_parallel_residual": flag(config, "use_parallel_residual", False)}


STABLELM = Family(
    architecture="stablelm",
    layer=_stablelm_layer,
    fixed=(
        ("hidden_act", "silu", "the MLP does not use SiLU"),
        ("qk_layernorm", False, "q and k are normalized"),
    ),
    details=_stablelm_details,
    rotated=lambda config, sizes: rotated_share("stablelm", config, sizes["head"], 0.25),
    output_norm=_OUTPUT_NORM,
)


_PHI_LAYER = (
    Module("attn_norm", "input_layernorm", ("embd",), True),
    *qkv(bias=True),
    Module("attn_output", "self_attn.dense", ("embd", "q"), True),
    Module("ffn_up", "mlp.fc1", ("ff", "embd"), True),
    Module("ffn_down", "mlp.fc2", ("embd", "ff"), True),
)

PHI = Family(
    architecture="phi2",
    layer=lambda config, index: _PHI_LAYER,
    fixed=(("qk_layernorm", False, "q and k are normalized"),),
    details=lambda config, sizes: gelu_form("phi2", config, "hidden_act", "gelu_new"),
    rotated=lambda config, sizes: rotated_share("phi2", config, sizes["head"], 0.5),
    output_norm=Module("output_norm", "final_layernorm", ("embd",), bias=True),
    head=HEAD._replace(bias=True),
)


_PHI_MOE_FIXED: Fixed = (
    ("hidden_act", "silu", "the MLP does not use SiLU"),
    ("num_experts_per_tok", 2, "the router chooses two"),
    ("router_jitter_noise", 0.01, "the router drops other experts"),
)


def _phi_moe_layer(config: Config, index: int) -> Iterator[Module]:
    bias = flag(config, "attention_bias", False)
    yield Module("attn_norm", "input_layernorm", ("embd",), True)
    yield from _attention(bias, bias)
    yield Module("ffn_norm", "post_attention_layernorm", ("embd",), True)
    yield from MIXTRAL_EXPERTS.modules(config)


def _phi_moe(config: Config) -> Family:
    return Family(
        architecture="phimoe",
        layer=_phi_moe_layer,
        fixed=_PHI_MOE_FIXED,
        details=lambda config, sizes: window_of_every_layer(config),
        rms=True,  # as the epsilon's key says in llama.cpp's files
        epsilon=("rms_norm_eps", 1e-5),
        output_norm=_OUTPUT_NORM,
        head=HEAD._replace(bias=flag(config, "lm_head_bias", False)),
        absent={"rope_theta": 1e6},
        mixture=MIXTRAL_EXPERTS,
    )


def _nemotron_layer(config: Config, index: int) -> Iterator[Module]:
    attention_bias = flag(config, "attention_bias", False)
    mlp_bias = flag(config, "mlp_bias", False)
    yield Module("attn_norm", "input_layernorm", ("embd",), True, add=1)
    yield from _attention(attention_bias, attention_bias)
    yield Module("ffn_norm", "post_attention_layernorm", ("embd",), True, add=1)
    yield Module("ffn_up", "mlp.up_proj", ("ff", "embd"), mlp_bias)
    yield Module("ffn_down", "mlp.down_proj", ("embd", "ff"), mlp_bias)


NEMOTRON = Family(
    architecture="nemotron",
    layer=_nemotron_layer,
    fixed=(("hidden_act", "relu2", "the MLP does not square ReLU"),),
    epsilon=("norm_eps", 1e-5),
    rotated=lambda config, sizes: rotated_share("nemotron", config, sizes["head"], 0.5),
    output_norm=_OUTPUT_NORM._replace(add=1),
)


_COMMAND_R_LAYER = (
    Module("attn_norm", "input_layernorm", ("embd",)),
    *_attention(False, False),
    *gated_mlp("mlp"),
)

COMMAND_R = Family(
    architecture="command-r",
    layer=lambda config, index: _COMMAND_R_LAYER,
    fixed=(
        ("hidden_act", "silu", "the MLP does not use SiLU"),
        ("use_qk_norm", False, "q and k are normalized"),
        ("attention_bias", False, "the attention has biases"),
    ),
    details=lambda config, sizes: {"logit_scale": number(config, "logit_scale", 0.0625)},
    tied=True,
)


def _cohere2_details(config: Config, sizes: Sizes) -> Metadata:
    return COMMAND_R.details(config, sizes) | window_of_pattern(config, period=4)


COHERE2 = replace(COMMAND_R, architecture="cohere2", details=_cohere2_details)

FAMILIES = {
    "Starcoder2ForCausalLM": STARCODER2,
    "StableLmForCausalLM": STABLELM,
    "PhiForCausalLM": PHI,
    "NemotronForCausalLM": NEMOTRON,
    "CohereForCausalLM": COMMAND_R,
    "Cohere2ForCausalLM": COHERE2,
}
VARIANTS = {"PhimoeForCausalLM": _phi_moe, "PhiMoEForCausalLM": _phi_moe}
