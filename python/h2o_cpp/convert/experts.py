"""Mixtures of experts in models of Llama's layout: metadata and modules."""

from collections.abc import Iterator
from typing import NamedTuple

from h2o_cpp.convert.config import Config, Fixed, Metadata, dimension, flag, found_key, number
from h2o_cpp.convert.family import GATE_UP_DOWN, Module, Sizes, TensorSpec, gated_mlp


class Mixture(NamedTuple):
    """A family's names for the parts of its mixtures, by default Qwen's, and what they compute."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts.{}"
    """{} is the number of the expert."""
    projections: tuple[str, str, str] = GATE_UP_DOWN
    """Gate, up and down."""
    ff: str = "moe_intermediate_size"
    """The key of an expert's feed-forward size."""
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
    says_shared_ff: bool = False
    """Whether files have its size, rather than only the number."""
    n_dense: str = ""
    """The key of the number of first layers without experts."""
    scale: str = ""
    """The key of a factor of the weights."""
    sigmoid: bool = False
    """Whether scores are sigmoids, rather than a softmax."""
    bias: str = ""
    """The name of a bias of the scores, for the selection only."""
    bias_shape: tuple[str, ...] = ("experts",)

    def metadata(self, config: Config) -> Metadata:
        """Metadata of a mixture."""
        n_experts, n_used = expert_counts(config)
        sizes = self.sizes(config)
        values: Metadata = {"expert_count": n_experts, "expert_used_count": n_used}
        if self.ff != "intermediate_size":
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
        sizes = {"experts": expert_counts(config)[0], "expert_ff": dimension(config, self.ff)}
        sizes["expert_both"] = 2 * sizes["expert_ff"]
        if self.shared:
            sizes["shared_ff"] = dimension(config, "shared_expert_intermediate_size")
        if self.n_shared:
            sizes["shared_ff"] = count(config, self.n_shared) * sizes["expert_ff"]
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
            yield from _shared_mlp("mlp.shared_experts")

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

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "moe_k")


def expert_counts(config: Config) -> tuple[int, int]:
    """The number of experts, and of those used per token."""
    n_experts = dimension(config, found_key(config, _COUNTS))
    used = found_key(config, _USED)
    n_used = dimension(config, used)
    if n_used > n_experts:
        raise ValueError(f"config.json: {used} is {n_used}, of {n_experts} experts")
    return n_experts, n_used


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
    normalized=True,
    says_normalized=False,
)
GRANITE_EXPERTS = MIXTRAL_EXPERTS._replace(
    router="block_sparse_moe.router.layer", experts="block_sparse_moe", joined=True
)
