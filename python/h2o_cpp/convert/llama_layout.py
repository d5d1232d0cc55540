"""The layout of Llama's checkpoints: RMS norms, gated MLP, rotary positions."""

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from h2o_cpp.convert.checkpoint import Values
from h2o_cpp.convert.config import Config, Fixed, Metadata, dimension, flag, refuse
from h2o_cpp.convert.family import Family
from h2o_cpp.convert.modules import EMBEDDING, Mixture, Module, Predictor, Sizes, gated_mlp, qkv
from h2o_cpp.convert.rope import rope_parameters, rotated_share

_OTHER_ACTIVATION = {
    "silu": "the MLP does not use SiLU",
    "relu2": "the MLP does not square ReLU",
    "xielu": "the MLP does not use xIELU",
}
_NO_BIASES: Fixed = (
    ("attention_bias", False, "the attention has biases that its official checkpoints lack"),
    ("mlp_bias", False, "the MLP has biases"),
)


class LlamaLayout(NamedTuple):
    """The differences between the architectures."""

    architecture: str
    rotates_pairs: bool = False
    """Whether adjacent dimensions (2i, 2i + 1) are rotated, rather than (i, i + head_size / 2) as
    in the checkpoint."""
    qkv_bias: bool | None = False
    """Whether Q, K and V have biases; None: if attention_bias is true."""
    output_bias: bool = True
    """Whether attention_bias is for the attention's output, too."""
    qk_norm: str | None = None
    """Whether Q and K are normalized: "heads" or "whole"."""
    qk_norm_key: str = ""
    """The key that says whether they are, if not always."""
    mixture: Mixture | None = None
    """The experts, instead of one MLP."""
    fixed: Fixed = ()
    """Checks for what GGUF files cannot express, besides what all families of the layout check."""
    more: Callable[[Config], Metadata] = lambda config: {}
    """Further metadata, such as windows. Raises ValueError for what GGUF cannot express."""
    embedding: str = EMBEDDING.hf
    """The HF name of the embedding."""
    attention: tuple[Module, ...] = ()
    """The modules of attention, if not those of Llama."""
    mlp: tuple[Module, ...] = ()
    """The modules of the MLP, if not those of Llama."""
    ff: str = ""
    """The key of the MLP's size, if not intermediate_size."""
    activation: str = "silu"
    """The MLP's hidden_act; only with silu is it that of a gate."""
    partial: float | None = None
    """The default share of a head that is rotated; None: all of it, always."""
    gemma: bool = False
    """Whether 1 is added to norm weights, and the MLP uses GELU."""
    norms: Mapping[str, str] = MappingProxyType(
        {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    )
    """The norms of a layer: name in the file -> in the checkpoint."""
    tied: bool = False
    """Whether the head is the embedding, unless config.json says otherwise."""
    absent: Config = MappingProxyType({})
    """HF's values of keys that config.json may lack: see Family."""
    ignored: re.Pattern[str] = Family.ignored
    """Names of tensors that are not written: see Family."""
    predictor: Predictor | None = None
    """The layer for multi-token prediction: see Family."""

    def family(self) -> Family:
        """The family of such checkpoints."""
        activation: Fixed = (("hidden_act", self.activation, _OTHER_ACTIVATION[self.activation]),)
        biases = () if self.qkv_bias is None else _NO_BIASES
        return Family(
            architecture=self.architecture,
            fixed=(*(() if self.gemma else activation), *biases, *self.fixed),
            layer=self._layer,
            details=lambda config, sizes: self.more(config),
            epsilon=("rms_norm_eps", 1e-6),
            rms=True,
            rotated=self._rotated,
            embeddings=(EMBEDDING._replace(hf=self.embedding),),
            output_norm=self._norm("output_norm", "norm"),
            tied=self.tied,
            absent=self.absent,
            more_sizes=self._more_sizes,
            mixture=self.mixture,
            ignored=self.ignored,
            predictor=self.predictor,
        )

    def _more_sizes(self, config: Config) -> Sizes:
        if not self.ff:
            return {}
        ff = dimension(config, self.ff)
        return {"ff": ff, "gate_and_up": 2 * ff}

    def _norm(self, gguf: str, hf: str, size: str = "embd") -> Module:
        return Module(gguf, hf, (size,), add=1.0 if self.gemma else 0.0)

    def _layer(self, config: Config, index: int) -> Iterator[Module]:
        yield from self.attention or self._attention(config)
        for gguf, hf in self.norms.items():
            yield self._norm(gguf, hf)
        if self.mixture is not None and index >= self.mixture.dense_layers(config):
            yield from self.mixture.modules(config)
            return
        mlp = self.mlp or gated_mlp("mlp", bias=flag(config, "mlp_bias", False))
        yield from mlp if self.activation == "silu" else mlp[1:]

    def _attention(self, config: Config) -> Iterator[Module]:
        biases = self.qkv_bias is None and flag(config, "attention_bias", False)
        reorder = pairs_from_halves if self.rotates_pairs else None
        yield from qkv(self.qkv_bias or biases, reorder)
        if self.qk_norm and (not self.qk_norm_key or flag(config, self.qk_norm_key, False)):
            whole = self.qk_norm == "whole"
            yield self._norm("attn_q_norm", "self_attn.q_norm", "q" if whole else "head")
            yield self._norm("attn_k_norm", "self_attn.k_norm", "kv" if whole else "head")
        output_bias = biases and self.output_bias
        yield Module("attn_output", "self_attn.o_proj", ("embd", "q"), output_bias)

    def _rotated(self, config: Config, sizes: Sizes) -> int:
        """The number of rotated dimensions of a head."""
        name, head = self.architecture, sizes["head"]
        if self.partial is not None:
            rotary = config.get("rotary_dim")  # MiniMax M2's first checkpoints
            if rotary is not None and rope_parameters(config).get("partial_rotary_factor") is None:
                config = {**config, "partial_rotary_factor": dimension(config, "rotary_dim") / head}
            return rotated_share(name, config, head, self.partial)
        key = "partial_rotary_factor"
        share = rope_parameters(config).get(key, config.get(key, 1.0))
        if share != 1 and name not in ("gemma3", "gemma-embedding"):
            raise refuse(name, key, share, "only a part of a head is rotated")
        return head


def pairs_from_halves(values: Values, head_size: int) -> Values:
    """Permute rows of each head so that dimensions i and i + head_size / 2 become adjacent."""
    halves: Values = values.reshape(-1, 2, head_size // 2, *values.shape[1:])
    return np.reshape(halves.swapaxes(1, 2), values.shape)
