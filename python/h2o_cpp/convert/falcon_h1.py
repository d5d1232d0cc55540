"""Falcon-H1 (`falcon-h1`): each layer has attention beside a state-space model (Mamba-2).

Files have weights that are multiplied by the factors of config.json.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, dimension, flag, number
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.mamba import FIXED, Mamba
from h2o_cpp.convert.modules import EMBEDDING, HEAD, Module, TensorSpec, gated_mlp, qkv

_NAME = "falcon-h1"


def _mamba(config: Config) -> Mamba:
    expand = dimension(config, "mamba_expand", 2)
    width = config.get("mamba_d_ssm", 1024)
    if width is None:
        width = expand * dimension(config, "hidden_size")
    mamba = Mamba.of(_NAME, config, dimension({"mamba_d_ssm": width}, "mamba_d_ssm"))
    return mamba._replace(normalized=flag(config, "mamba_rms_norm", False))


def _scaled(*factors: float) -> Callable[[Values, int], Values]:
    """Multiply the weights."""
    factor = np.float32(np.prod(factors))
    return lambda values, head: values * factor


def _numbers(config: Config, key: str, n: int) -> list[float]:
    """A list of n factors, by default 1."""
    found = config.get(key) or [1.0] * n
    if not isinstance(found, list) or len(found) != n:
        raise ValueError(f"config.json: {key} must have {n} numbers, found {found!r}")
    return [number({key: one}, key) for one in found]


def _layer(config: Config, index: int) -> Iterator[Module]:
    def factor(name: str) -> float:
        return number(config, f"{name}_multiplier", 1.0)

    mamba = _mamba(config)
    state = mamba.groups * mamba.state
    parts = (mamba.width, mamba.width, state, state, mamba.heads)
    multipliers = _numbers(config, "ssm_multipliers", 5)
    rows = np.repeat(np.asarray(multipliers, np.float32), parts) * np.float32(factor("ssm_in"))
    ssm_in, ssm_out = mamba.modules()
    q, k, v = qkv()
    gate, up, down = gated_mlp("feed_forward")
    into, out = factor("attention_in"), factor("attention_out")
    of_gate, of_down = _numbers(config, "mlp_multipliers", 2)

    yield Module("attn_norm", "input_layernorm", ("embd",))
    yield ssm_in._replace(reorder=lambda values, head: values * rows[:, None])
    yield ssm_out._replace(reorder=_scaled(factor("ssm_out")))
    yield q._replace(reorder=_scaled(into))
    yield k._replace(reorder=_scaled(into, factor("key")))
    yield v._replace(reorder=_scaled(into))
    yield Module("attn_output", "self_attn.o_proj", ("embd", "q"), reorder=_scaled(out))
    yield gate._replace(reorder=_scaled(of_gate))
    yield up
    yield down._replace(reorder=_scaled(of_down))


def _more_tensors(config: Config, index: int, embd: int) -> Iterator[TensorSpec]:
    yield from _mamba(config).tensors(index)
    # In llama.cpp's files, its name does not end in ".weight".
    hf = f"layers.{index}.pre_ff_layernorm.weight"
    yield TensorSpec(f"blk.{index}.ffn_norm", hf, (embd,))


def _family(config: Config) -> Family:
    """The family of a config.json."""
    scaled_head = HEAD._replace(reorder=_scaled(number(config, "lm_head_multiplier", 1.0)))
    embedding = number(config, "embedding_multiplier", 1.0)
    family = Family(
        architecture=_NAME,
        layer=_layer,
        fixed=(
            ("hidden_act", "silu", "the MLP does not use SiLU"),
            ("attention_bias", False, "there are biases"),
            ("mlp_bias", False, "there are biases"),
            ("projectors_bias", False, "there are biases"),
            *FIXED,
        ),
        details=lambda config, sizes: {
            **_mamba(config).metadata(_NAME, config),
            "attention.key_length": sizes["head"],
            "attention.value_length": sizes["head"],
        },
        epsilon=("rms_norm_eps", 1e-5),
        rms=True,
        embeddings=(EMBEDDING._replace(reorder=_scaled(embedding)),),
        output_norm=Module("output_norm", "final_layernorm", ("embd",)),
        head=scaled_head,
        absent={"num_key_value_heads": 8},
        more_sizes=lambda config: _mamba(config).sizes(),
        more_tensors=lambda config, index, sizes: _more_tensors(config, index, sizes["embd"]),
    )
    if flag(config, "tie_word_embeddings", False):  # the file has both, with their factors
        head = scaled_head._replace(hf=EMBEDDING.hf)
        family = replace(family, head=head, tied_keys=("untied",))
    if flag(config, "mamba_rms_norm", False):
        norm = "mamba_norm_before_gate", False, "norms are before gates"
        family = replace(
            family, fixed=(*family.fixed, norm), absent={**family.absent, norm[0]: True}
        )
    return family


VARIANTS = {"FalconH1ForCausalLM": _family}
