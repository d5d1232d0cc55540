"""The parts of models: tensors, modules with a weight, and mixtures of experts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, Fixed, Metadata, dimension, flag, found_key, number

Sizes = Mapping[str, int]
"""The sizes of a model by the names that its modules use, such as embd and ff."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to write: `gguf` is its name in the file, `hf` its name in the checkpoint.

    `shape` is the shape in the checkpoint, in PyTorch order (..., rows, columns). Only rows[0] to
    rows[1] - 1 are written. `transform` changes the values; `written` is the resulting shape, if it
    differs. With `stack`, this many tensors of that shape are stacked; {} in `hf` is the number.
    With `mxfp4_rows`, the checkpoint may have it in MXFP4, transposed, as `hf`_blocks and
    `hf`_scales; these rows of each matrix are copied.
    """

    gguf: str
    hf: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    transform: Callable[[Values], Values] | None = None
    stack: int = 0
    written: tuple[int, ...] | None = None
    mxfp4_rows: slice | None = None

    @property
    def written_shape(self) -> tuple[int, ...]:
        """The shape in the file, in PyTorch order."""
        if self.written is not None:
            return self.written
        shape = list(self.shape)
        if self.rows is not None:
            shape[-2] = self.rows[1] - self.rows[0]
        return (self.stack, *shape) if self.stack else tuple(shape)

    def sources(self) -> list[str]:
        """The names in the checkpoint."""
        return [self.hf.format(i) for i in range(self.stack)] if self.stack else [self.hf]


class Module(NamedTuple):
    """A module with a weight and optionally a bias; `shape` names the sizes of the weight.

    With {} in `hf`, there is one per expert.
    `reorder` permutes the rows of both, or scales them, given the head size; `add` is added to the
    weight.
    `rows` names the first row to write and the end. With `transposed`, the weight is transposed in
    the checkpoint.
    """

    gguf: str
    hf: str
    shape: tuple[str, ...]
    bias: bool = False
    reorder: Callable[[Values, int], Values] | None = None
    add: float = 0
    rows: tuple[str, str] | None = None
    transposed: bool = False

    def in_layer(self, index: int, layers: str) -> "Module":
        """This module in a layer; `layers` is the HF name of the list of layers."""
        return self._replace(gguf=f"blk.{index}.{self.gguf}", hf=f"{layers}.{index}.{self.hf}")

    def tensors(self, sizes: Sizes) -> Iterator[TensorSpec]:
        """The weight, and the bias if there is one."""
        shape = tuple(sizes[name] for name in self.shape)
        stack = sizes["experts"] if "{}" in self.hf else 0
        weight = TensorSpec(
            f"{self.gguf}.weight",
            f"{self.hf}.weight",
            shape,
            rows=None if self.rows is None else (sizes[self.rows[0]], sizes[self.rows[1]]),
            transform=self._added() if self.add else self._reordered(sizes),
            stack=stack,
        )
        if self.transposed:
            weight = replace(weight, shape=shape[::-1], transform=transposed, written=shape)
        yield weight
        if self.bias:
            bias, hf = f"{self.gguf}.bias", f"{self.hf}.bias"
            yield TensorSpec(bias, hf, shape[:1], transform=self._reordered(sizes), stack=stack)

    def _added(self) -> Callable[[Values], Values]:
        add = np.float32(self.add)
        return lambda values: values + add

    def _reordered(self, sizes: Sizes) -> Callable[[Values], Values] | None:
        reorder = self.reorder
        return None if reorder is None else lambda values: reorder(values, sizes["head"])


class Predictor(NamedTuple):
    """A layer for multi-token prediction behind the others."""

    projection: str
    """The HF name of nextn.eh_proj, where {} is the layer's number; a checkpoint without it has no
    such layer."""
    modules: Callable[[Config, int], Iterator[Module]]
    """config.json, the layer's number -> its modules; without those of any layer if it is listed.
    """
    is_listed: bool = False
    """Whether it is in the list of layers, after the others, and like them."""

    def metadata(self, known: Metadata, n_layers: int) -> Metadata:
        """The changes in the metadata of a model."""
        changed: Metadata = {"block_count": n_layers + 1, "nextn_predict_layers": 1}
        recurrent = known.get("attention.recurrent_layers")
        if isinstance(recurrent, list):
            changed["attention.recurrent_layers"] = [*map(bool, recurrent), False]
        return changed


def listed_predictor(
    norm: tuple[str, str] = ("nextn.shared_head_norm", "shared_head.norm"),
) -> Predictor:
    """The predictor of DeepSeek V3; its embedding and head are those of the model.

    norm: the name of its last norm in the file and in the checkpoint.
    """

    def modules(_config: Config, index: int) -> Iterator[Module]:
        for gguf, hf in (("nextn.enorm", "enorm"), ("nextn.hnorm", "hnorm"), norm):
            yield Module(gguf, hf, ("embd",)).in_layer(index, "layers")
        yield Module("nextn.eh_proj", "eh_proj", ("embd", "two_embd")).in_layer(index, "layers")

    return Predictor("layers.{}.eh_proj", modules, is_listed=True)


def separate_predictor(layer: Callable[[Config], Iterator[Module]], add: float = 0.0) -> Predictor:
    """The predictor of Qwen3.5.

    layer: its other modules. add: what is added to the weights of its own norms.
    """

    def modules(config: Config, index: int) -> Iterator[Module]:
        def named(module: Module, hf: str) -> Module:
            return module._replace(gguf=f"blk.{index}.{module.gguf}", hf=f"mtp.{hf}")

        for gguf, hf in (
            ("enorm", "pre_fc_norm_embedding"),
            ("hnorm", "pre_fc_norm_hidden"),
            ("shared_head_norm", "norm"),
        ):
            yield named(Module(f"nextn.{gguf}", "", ("embd",), add=add), hf)
        yield named(Module("nextn.eh_proj", "", ("embd", "two_embd")), "fc")
        for module in layer(config):
            yield named(module, f"layers.0.{module.hf}")

    return Predictor("mtp.fc", modules)


def transposed(values: Values) -> Values:
    """The values with rows and columns exchanged, of each matrix if there are several."""
    return np.ascontiguousarray(values.swapaxes(-1, -2))


def transposed_part(columns: slice) -> Callable[[Values], Values]:
    """Select columns, such as those of gate: [experts, in, 2 out] -> [experts, out, in]."""
    return lambda values: transposed(values[..., columns])


def negative_exp(values: Values) -> Values:
    """-e^x, for numbers that checkpoints have as logarithms."""
    with np.errstate(over="ignore"):  # PlannedTensor refuses infinities
        return -np.exp(values)


def without_channels(values: Values) -> Values:
    """The weights of a convolution of each channel alone, without the dimension of channels."""
    return values[:, 0]


def qkv(
    bias: bool = False, reorder: Callable[[Values, int], Values] | None = None
) -> tuple[Module, ...]:
    """Q, K and V as in Llama's checkpoints; `reorder` is for Q and K."""
    return (
        Module("attn_q", "self_attn.q_proj", ("q", "embd"), bias, reorder),
        Module("attn_k", "self_attn.k_proj", ("kv", "embd"), bias, reorder),
        Module("attn_v", "self_attn.v_proj", ("kv", "embd"), bias),
    )


_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def gated_mlp(
    hf: str,
    names: tuple[str, str, str] = _GATE_UP_DOWN,
    *,
    kind: str = "",
    size: str = "ff",
    bias: bool = False,
) -> tuple[Module, ...]:
    """The gate, up and down of an MLP, with these names in `hf`.

    kind: the end of their names in the file, such as _exps. size: the name of their size.
    """
    gate, up, down = names
    return (
        Module(f"ffn_gate{kind}", f"{hf}.{gate}", (size, "embd"), bias),
        Module(f"ffn_up{kind}", f"{hf}.{up}", (size, "embd"), bias),
        Module(f"ffn_down{kind}", f"{hf}.{down}", ("embd", size), bias),
    )


EMBEDDING = Module("token_embd", "embed_tokens", ("vocab", "embd"))
OUTPUT_NORM = Module("output_norm", "norm", ("embd",))
HEAD = Module("output", "lm_head", ("vocab", "embd"))

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED_COUNTS = ("num_experts_per_tok", "moe_k", "moe_topk")


class Mixture(NamedTuple):
    """A family's names for the parts of its mixtures, by default Qwen's, and what they compute."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts.{}"
    """{} is the number of the expert."""
    projections: tuple[str, str, str] = _GATE_UP_DOWN
    """Gate, up and down."""
    ff: str = "moe_intermediate_size"
    """The key of an expert's feed-forward size, which is that of an MLP without it."""
    says_ff: bool = True
    """Whether files have this size."""
    normalized: bool = False
    """Whether the weights of a token's experts sum to 1 by default in the GGUF architecture."""
    says_normalized: bool = True
    """Whether config.json has norm_topk_prob."""
    joined: bool = False
    """Whether all experts are one 3-D tensor, with gate and up joined."""
    shared: bool = False
    """Whether there is a shared expert, with a gate."""
    n_shared: str = ""
    """The key of the number of shared experts, which are one MLP without a gate."""
    shared_mlp: str = "mlp.shared_experts"
    """Its name."""
    says_shared_ff: bool = False
    """Whether files store the size of the shared experts, not only their number."""
    n_dense: str = ""
    """The key of the number of first layers without experts."""
    scale: str = ""
    """The key of a factor of the weights."""
    sigmoid: bool = False
    """Whether scores are sigmoids, rather than a softmax."""
    bias: str = ""
    """The name of a bias that is added to scores only to select experts."""
    bias_shape: tuple[str, ...] = ("experts",)

    def metadata(self, config: Config, sizes: Sizes) -> Metadata:
        """Metadata of a mixture. Raises ValueError if a token uses more experts than there are."""
        n_experts, used = sizes["experts"], found_key(config, _USED_COUNTS)
        n_used = dimension(config, used)
        if n_used > n_experts:
            raise ValueError(f"config.json: {used} is {n_used}, but there are {n_experts} experts")
        values: Metadata = {"expert_count": n_experts, "expert_used_count": n_used}
        if self.says_ff:
            values["expert_feed_forward_length"] = sizes["expert_ff"]
        if self.n_shared:
            values["expert_shared_count"] = count(config, self.n_shared)
        if self.shared or (self.says_shared_ff and sizes["shared_ff"]):
            values["expert_shared_feed_forward_length"] = sizes["shared_ff"]
        if self.n_dense:
            values["leading_dense_block_count"] = self.dense_layers(config)
        if self.scale:
            values["expert_weights_scale"] = number(config, self.scale, 1.0)
        if self.sigmoid:
            values["expert_gating_func"] = 2
            if count(config, "n_group") > 1:
                values["expert_group_count"] = dimension(config, "n_group")
                values["expert_group_used_count"] = dimension(config, "topk_group")
        if self.says_normalized:
            normalized = flag(config, "norm_topk_prob", False)
            if normalized != self.normalized:
                values["expert_weights_norm"] = normalized
        return values

    def sizes(self, config: Config) -> Sizes:
        """The sizes in the shapes of the modules."""
        n_experts = dimension(config, found_key(config, _EXPERT_COUNTS))
        ff = dimension(config, found_key(config, (self.ff, "intermediate_size")))
        sizes = {"experts": n_experts, "expert_ff": ff, "expert_both": 2 * ff}
        if self.shared:
            sizes["shared_ff"] = dimension(config, "shared_expert_intermediate_size")
        if self.n_shared:
            sizes["shared_ff"] = count(config, self.n_shared) * ff
        return sizes

    def dense_layers(self, config: Config) -> int:
        """The number of first layers without experts."""
        return count(config, self.n_dense) if self.n_dense else 0

    def modules(self, config: Config) -> Iterator[Module]:
        """The modules of a layer."""
        yield Module("ffn_gate_inp", self.router, ("experts", "embd"))
        if self.joined:
            both, out = f"{self.experts}.input_linear", f"{self.experts}.output_linear"
            shape = ("experts", "expert_both", "embd")
            yield Module("ffn_gate_exps", both, shape, rows=("none", "expert_ff"))
            yield Module("ffn_up_exps", both, shape, rows=("expert_ff", "expert_both"))
            yield Module("ffn_down_exps", out, ("experts", "embd", "expert_ff"))
            return
        yield from gated_mlp(self.experts, self.projections, kind="_exps", size="expert_ff")
        if self.shared:
            yield from SHARED_EXPERT
        if self.n_shared and count(config, self.n_shared):
            yield from _shared_mlp(self.shared_mlp)

    def bias_of(self, config: Config, layer: int, sizes: Sizes) -> Iterator[TensorSpec]:
        """The bias of a layer's scores, if there is one."""
        if self.bias and layer >= self.dense_layers(config):
            shape = tuple(sizes[name] for name in self.bias_shape)
            hf = f"layers.{layer}.{self.bias}"
            yield TensorSpec(f"blk.{layer}.exp_probs_b.bias", hf, shape, written=shape[-1:])


def _shared_mlp(name: str) -> tuple[Module, ...]:
    """An MLP that all tokens use."""
    return gated_mlp(name, kind="_shexp", size="shared_ff")


SHARED_EXPERT = (
    Module("ffn_gate_inp_shexp", "mlp.shared_expert_gate", ("one", "embd")),
    *_shared_mlp("mlp.shared_expert"),
)


def count(config: Config, key: str) -> int:
    """A number that may be 0, as it is if the key is missing or null."""
    return 0 if config.get(key) in (None, 0) else dimension(config, key)


EVERY_LAYER: Fixed = (
    ("decoder_sparse_step", 1, "some layers have no experts"),
    ("mlp_only_layers", [], "some layers have no experts"),
)

MIXTRAL_EXPERTS = Mixture(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts.{}",
    projections=("w1", "w3", "w2"),
    ff="intermediate_size",
    says_ff=False,
    normalized=True,
    says_normalized=False,
)
