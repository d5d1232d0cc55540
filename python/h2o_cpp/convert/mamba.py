"""Layers of a state-space model (Mamba-2), which several families have beside attention."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, Fixed, Metadata, dimension, flag, refuse
from h2o_cpp.convert.modules import Module, Sizes, TensorSpec, negative_exp, without_channels

FIXED: Fixed = (("mamba_proj_bias", False, "the projections of state-space layers have biases"),)
_INFINITE = (float("inf"), "Infinity", {"__float__": "Infinity"})  # the last is transformers 5's


class Mamba(NamedTuple):
    """The sizes of such layers, and their names."""

    heads: int
    head: int
    groups: int
    state: int
    taps: int
    hf: str = "mamba"
    """The name of the module in a layer."""
    normalized: bool = True
    conv_bias: bool = True

    @staticmethod
    def of(architecture: str, config: Config, width: int) -> "Mamba":
        """The sizes, by the keys of most families. Raises ValueError if heads do not fill the
        width.
        """
        heads = dimension(config, "mamba_n_heads", 128)
        head = config.get("mamba_d_head", "auto")
        if width % heads or head not in ("auto", None, width // heads):
            why = f"{heads} heads of this size do not have the width {width}"
            raise refuse(architecture, "mamba_d_head", head, why)
        return Mamba(
            heads,
            width // heads,
            dimension(config, "mamba_n_groups", 1),
            dimension(config, "mamba_d_state", 256),
            dimension(config, "mamba_d_conv", 4),
            conv_bias=flag(config, "mamba_conv_bias", True),
        )

    @property
    def width(self) -> int:
        """The width of all heads."""
        return self.heads * self.head

    @property
    def channels(self) -> int:
        """The channels of the convolution: the heads' inputs, then B and C of all groups."""
        return self.width + 2 * self.groups * self.state

    def sizes(self) -> Sizes:
        """The sizes in the shapes of the modules."""
        return {"ssm": self.width, "ssm_in": self.width + self.channels + self.heads}

    def metadata(self, architecture: str, config: Config) -> Metadata:
        """The keys of files. Raises ValueError if time steps are limited."""
        limit = config.get("time_step_limit")
        match limit:
            case None:
                pass
            case [least, most] if least == 0 and most in _INFINITE:
                pass
            case _:
                raise refuse(architecture, "time_step_limit", limit, "time steps are limited")
        return {
            "ssm.conv_kernel": self.taps,
            "ssm.inner_size": self.width,
            "ssm.state_size": self.state,
            "ssm.time_step_rank": self.heads,
            "ssm.group_count": self.groups,
        }

    def modules(self) -> tuple[Module, ...]:
        """The matrices of a layer."""
        return (
            Module("ssm_in", f"{self.hf}.in_proj", ("ssm_in", "embd")),
            Module("ssm_out", f"{self.hf}.out_proj", ("embd", "ssm")),
        )

    def tensors(self, index: int) -> Iterator[TensorSpec]:
        """The other tensors of a layer."""
        blk, hf = f"blk.{index}", f"layers.{index}.{self.hf}"
        heads, channels, groups = self.heads, self.channels, self.groups

        def decay(values: Values) -> Values:
            return negative_exp(values)[:, None]

        def grouped(values: Values) -> Values:
            return values.reshape(groups, -1)

        yield TensorSpec(
            f"{blk}.ssm_a", f"{hf}.A_log", (heads,), transform=decay, written=(heads, 1)
        )
        yield TensorSpec(
            f"{blk}.ssm_d", f"{hf}.D", (heads,), transform=lambda d: d[:, None], written=(heads, 1)
        )
        yield TensorSpec(f"{blk}.ssm_dt.bias", f"{hf}.dt_bias", (heads,))
        yield TensorSpec(
            f"{blk}.ssm_conv1d.weight",
            f"{hf}.conv1d.weight",
            (channels, 1, self.taps),
            transform=without_channels,
            written=(channels, self.taps),
        )
        if self.conv_bias:
            yield TensorSpec(f"{blk}.ssm_conv1d.bias", f"{hf}.conv1d.bias", (channels,))
        if self.normalized:
            yield TensorSpec(
                f"{blk}.ssm_norm.weight",
                f"{hf}.norm.weight",
                (self.width,),
                transform=grouped,
                written=(groups, self.width // groups),
            )


def kv_heads(sizes: Sizes, attends: Sequence[bool]) -> Metadata:
    """The KV heads of each layer: none in those without attention.

    Raises ValueError if no layer has attention.
    """
    if not any(attends):
        raise ValueError("config.json: no layer has attention, expected at least one")
    return {"attention.head_count_kv": [sizes["kv_heads"] if one else 0 for one in attends]}
