"""Nemotron-H (`nemotron_h`) and Nemotron 3 Nano (`nemotron_h_moe`).

A layer is one block: of a state-space model (Mamba-2), attention without positions, or an MLP or a
mixture of experts, without gates.
"""

import re
from collections.abc import Iterator

from h2o_cpp.convert.config import Config, Metadata, dimension, flag, found_key, number
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.mamba import FIXED, Mamba, kv_heads
from h2o_cpp.convert.modules import Mixture, Module, Sizes, TensorSpec, qkv

_PREDICTIONS = re.compile(r"mtp\..*")  # of further tokens
_EPSILON = ("layer_norm_epsilon", 1e-5)
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_OTHER_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}

_ATTENTION = (
    *(module._replace(hf=module.hf.replace("self_attn", "mixer")) for module in qkv()),
    Module("attn_output", "mixer.o_proj", ("embd", "q")),
)
_MLP = (
    Module("ffn_up", "mixer.up_proj", ("ff", "embd")),
    Module("ffn_down", "mixer.down_proj", ("embd", "ff")),
)
_EXPERTS = (
    Module("ffn_gate_inp", "mixer.gate", ("experts", "embd")),
    Module("ffn_up_exps", "mixer.experts.{}.up_proj", ("expert_ff", "embd")),
    Module("ffn_down_exps", "mixer.experts.{}.down_proj", ("embd", "expert_ff")),
    Module("ffn_up_shexp", "mixer.shared_experts.up_proj", ("shared_ff", "embd")),
    Module("ffn_down_shexp", "mixer.shared_experts.down_proj", ("embd", "shared_ff")),
)
_MIXTURE = Mixture(
    n_shared="n_shared_experts",
    says_shared_ff=True,
    scale="routed_scaling_factor",
    sigmoid=True,
)


def _kinds(config: Config) -> list[str]:
    """The kind of each layer. Raises ValueError for a list or a pattern with others."""
    key = next((k for k in ("layers_block_type", "layer_types") if config.get(k) is not None), None)
    found = config.get(key or "hybrid_override_pattern") or ""
    names = _OTHER_NAMES if key else _PATTERN
    given = [*map(str, found)] if isinstance(found, str | list) else []
    kinds = [names.get(kind, kind) for kind in given]
    if not kinds or not {*kinds} <= {*_PATTERN.values()}:
        raise ValueError(
            f"config.json: {key or 'hybrid_override_pattern'} must have the kinds of all layers,"
            f" of {', '.join(_PATTERN.values())}, found {found!r}"
        )
    return kinds


def _mamba(config: Config) -> Mamba:
    return Mamba(
        dimension(config, "mamba_num_heads", 128),
        dimension(config, "mamba_head_dim", 64),
        dimension(config, found_key(config, ("n_groups", "mamba_n_groups")), 8),
        dimension(config, "ssm_state_size", 128),
        dimension(config, found_key(config, ("conv_kernel", "mamba_d_conv")), 4),
        hf="mixer",
        conv_bias=flag(config, found_key(config, ("use_conv_bias", "mamba_conv_bias")), True),
    )


def _layer(config: Config, index: int) -> Iterator[Module]:
    yield Module("attn_norm", "norm", ("embd",))
    match _kinds(config)[index]:
        case "mamba":
            yield from _mamba(config).modules()
        case "attention":
            yield from _ATTENTION
        case "mlp":
            yield from _MLP
        case _:
            yield from _EXPERTS


def _more_tensors(config: Config, index: int, sizes: Sizes) -> Iterator[TensorSpec]:
    match _kinds(config)[index]:
        case "mamba":
            yield from _mamba(config).tensors(index)
        case "moe":
            hf = f"layers.{index}.mixer.gate.e_score_correction_bias"
            yield TensorSpec(f"blk.{index}.exp_probs_b.bias", hf, (sizes["experts"],))


def _details(config: Config, sizes: Sizes) -> Metadata:
    kinds = _kinds(config)
    block, ff = ("moe", sizes["expert_ff"]) if "moe" in kinds else ("mlp", sizes["ff"])
    return {
        **_mamba(config).metadata("nemotron_h", config),
        **kv_heads(sizes, [kind == "attention" for kind in kinds]),
        "feed_forward_length": [ff if kind == block else 0 for kind in kinds],
        "attention.key_length": sizes["head"],
        "attention.value_length": sizes["head"],
        "attention.layer_norm_epsilon": number(config, *_EPSILON),  # llama.cpp wants both
    }


def _more_sizes(config: Config) -> Sizes:
    kinds = _kinds(config)
    sizes = {**_mamba(config).sizes(), "layers": len(kinds)}
    if "moe" in kinds:
        sizes["shared_ff"] = dimension(config, "moe_shared_expert_intermediate_size")
    return sizes


def _head_size(config: Config) -> int:
    old = "attention_head_dim"
    return dimension(config, "head_dim" if config.get(old) is None else old, 128)


def _family(config: Config) -> Family:
    """The family of a config.json."""
    kinds = _kinds(config)
    experts = "moe" in kinds
    if {"mlp", "moe"} <= {*kinds}:
        raise ValueError("config.json: some layers are an MLP and some have experts")
    if not {"mlp", "moe"} & {*kinds}:
        raise ValueError("config.json: no layer is an MLP or has experts, expected at least one")
    return Family(
        architecture="nemotron_h_moe" if experts else "nemotron_h",
        layer=_layer,
        fixed=(
            ("mlp_hidden_act", "relu2", "the MLP does not square ReLU"),
            ("mamba_hidden_act", "silu", "state-space layers do not use SiLU"),
            ("attention_bias", False, "there are biases"),
            ("mlp_bias", False, "there are biases"),
            ("use_bias", False, "there are biases"),
            ("sliding_window", None, "attention has a window"),
            ("moe_latent_size", None, "experts have another width than the model"),
            *FIXED,
        ),
        details=_details,
        epsilon=_EPSILON,
        rms=True,
        rotated=None,
        base_prefix="backbone.",
        embeddings=(Module("token_embd", "embeddings", ("vocab", "embd")),),
        output_norm=Module("output_norm", "norm_f", ("embd",)),
        absent={
            "num_hidden_layers": len(kinds),
            "num_key_value_heads": 8,
            "norm_topk_prob": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
        },
        head_size=_head_size,
        more_sizes=_more_sizes,
        more_tensors=_more_tensors,
        ignored=_PREDICTIONS,
        mixture=_MIXTURE if experts else None,
        has_mlp=not experts,
    )


VARIANTS = {"NemotronHForCausalLM": _family}
