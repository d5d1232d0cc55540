"""The description of a model family; `llama`, `gpt` and others have the families."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from h2o_cpp.convert.checkpoint import SourceTensor, Values
from h2o_cpp.convert.config import (
    Config,
    Fixed,
    Metadata,
    check_fixed,
    dimension,
    flag,
    found_key,
    number,
    refuse,
)
from h2o_cpp.convert.modules import (
    EMBEDDING,
    HEAD,
    OUTPUT_NORM,
    Mixture,
    Module,
    Predictor,
    Sizes,
    TensorSpec,
)
from h2o_cpp.convert.rope import rope_metadata, rope_tensors

# size -> keys in config.json
_SIZE_KEYS = {
    "embd": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "ff": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "context": (
        "max_position_embeddings",
        "n_positions",
        "seq_length",
        "max_seq_len",
        "max_sequence_length",
        "model_max_length",
    ),
}


def whole_head(config: Config, sizes: Sizes) -> int:
    """The rotated dimensions of a head: all."""
    return sizes["head"]


@dataclass(frozen=True)
class Family:
    """A model family: its GGUF architecture and its checkpoints."""

    architecture: str
    """general.architecture, and the prefix of the family's metadata keys."""

    layer: Callable[[Config, int], Iterable[Module]]
    """config.json, index -> the modules of a layer, in file order."""

    fixed: Fixed = ()
    """Checks for what GGUF files cannot express."""

    details: Callable[[Config, Sizes], Metadata] = lambda config, sizes: {}
    """config.json -> further metadata. Raises ValueError for a model that the architecture cannot
    represent.
    """

    of_weights: Callable[[Mapping[str, SourceTensor], int], Metadata] = lambda tensors, layers: {}
    """The tensors of the checkpoint, number of layers -> metadata from their values. Raises
    ValueError if one is missing.
    """

    epsilon: tuple[str, float] = ("layer_norm_eps", 1e-5)
    """The key of the norms' epsilon, and HF's default."""

    rms: bool = False
    """Whether the norms are RMS norms."""

    rotated: Callable[[Config, Sizes], int] | None = whole_head
    """The number of rotated dimensions of a head; None: no rotary positions."""

    base_prefix: str = "model."
    """The prefix of the HF names of all tensors but the head; absent if only the base was saved.
    Names of modules and in `ignored` are without it.
    """

    layers: str = "layers"
    """The HF name of the list of layers."""

    embeddings: tuple[Module, ...] = (EMBEDDING,)
    output_norm: Module | None = OUTPUT_NORM

    more_modules: tuple[Module, ...] = ()
    """Modules after the layers, besides output_norm and head."""

    head: Module | None = HEAD
    """None: an encoder, which has no head for the next token."""

    tied: bool = False
    """Whether the head is the embedding, unless config.json says otherwise."""

    tied_keys: tuple[str, ...] = ("tie_word_embeddings",)
    """The keys that say so; the first that config.json has counts."""

    absent: Config = field(default_factory=dict)
    """HF's values of keys that config.json may lack, where they differ from those here."""

    defaults: Sizes = field(default_factory=dict)
    """Sizes if config.json lacks their keys; ff_ratio is ff / embd."""

    kv_heads: Callable[[Config], int | None] = lambda config: None
    """The number of KV heads, if not num_key_value_heads."""

    head_size: Callable[[Config], int | None] = lambda config: None
    """The size of a head, if neither head_dim nor embd / heads."""

    more_sizes: Callable[[Config], Sizes] = lambda config: {}
    """Sizes that only this family's modules use."""

    more_tensors: Callable[[Config, int, Sizes], Iterable[TensorSpec]] = (
        lambda config, index, sizes: ()
    )
    """config.json, index, sizes -> tensors of a layer that do not belong to a module."""

    predictor: Predictor | None = None
    """The layer for multi-token prediction, if it is written where a checkpoint has one."""

    # Old checkpoints have frequencies.
    ignored: re.Pattern[str] = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    """Names of tensors that a checkpoint may have and that are not written; see ignores()."""

    add_bos: bool = False
    """The default of tokenizer.ggml.add_bos_token."""

    mixture: Mixture | None = None
    """The experts, if there are any."""

    has_mlp: bool = True
    """Whether config.json has the size of an MLP, and not only those of experts."""

    mxfp4: bool = False
    """Whether checkpoints may have weights in MXFP4."""

    control_tokens: frozenset[str] = frozenset()
    """Control tokens, even if the checkpoint does not list them as special."""

    visible_tokens: frozenset[str] = frozenset()
    """Tokens that are text, even if the checkpoint lists them as special."""

    piece_merges: bool = False
    """Whether a BPE of pieces keeps its merges: see read_tokens."""

    def sizes(self, config: Config) -> Sizes:
        """config.json -> the sizes of modules. Raises ValueError for inconsistent ones."""
        embd, heads = _size(config, "embd"), _size(config, "heads")
        head = self._head_size(config, embd, heads)
        kv_heads = self.kv_heads(config)
        if kv_heads is None:
            kv_heads = dimension(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            why = f"{heads} heads of Q cannot share them evenly"
            raise refuse(self.architecture, "num_key_value_heads", kv_heads, why)
        q, kv = heads * head, kv_heads * head
        sizes = {
            "vocab": dimension(config, "vocab_size"),
            "context": _size(config, "context", self.defaults.get("context")),
            "layers": _size(config, "layers"),
            "embd": embd,
            "heads": heads,
            "kv_heads": kv_heads,
            "head": head,
            "q": q,
            "q_and_gate": 2 * q,
            "kv": kv,
            "q_and_k": q + kv,
            "qkv": q + 2 * kv,
            "two_embd": 2 * embd,
            "none": 0,
            "one": 1,
        }
        if self.has_mlp:
            ratio = self.defaults.get("ff_ratio")
            ff = _size(config, "ff", None if ratio is None else ratio * embd)
            sizes |= {"ff": ff, "gate_and_up": 2 * ff}
        if self.mixture is not None:
            sizes |= self.mixture.sizes(config)
        return {**sizes, **self.more_sizes(config)}

    def _head_size(self, config: Config, embd: int, heads: int) -> int:
        """The size of a head: by default head_dim, or embd / heads."""
        if (size := self.head_size(config)) is not None:
            return size
        if config.get("head_dim") is not None:
            return dimension(config, "head_dim")
        if embd % heads:
            why = f"the heads do not divide the width {embd} evenly"
            raise refuse(self.architecture, found_key(config, _SIZE_KEYS["heads"]), heads, why)
        return embd // heads

    def metadata(self, config: Config) -> Metadata:
        """config.json -> the metadata of the model; int is written as u32, float as f32.

        Raises ValueError for a model that the architecture cannot represent.
        """
        check_fixed(self.architecture, config, self.fixed)
        sizes = self.sizes(config)
        key, default = self.epsilon
        rms = "rms_" if self.rms else ""
        values: Metadata = {
            "context_length": sizes["context"],
            "embedding_length": sizes["embd"],
            "block_count": sizes["layers"],
            "attention.head_count": sizes["heads"],
            "attention.head_count_kv": sizes["kv_heads"],
            f"attention.layer_norm_{rms}epsilon": number(config, key, default),
            "vocab_size": sizes["vocab"],
        }
        if self.has_mlp:
            values["feed_forward_length"] = sizes["ff"]
        if config.get("head_dim") is not None:
            values["attention.key_length"] = values["attention.value_length"] = sizes["head"]
        if self.rotated is not None:
            if sizes["head"] % 2:
                why = "a head has no halves to rotate"
                raise refuse(self.architecture, "head_dim", sizes["head"], why)
            values["rope.dimension_count"] = self.rotated(config, sizes)
            values |= rope_metadata(self.architecture, config)
        if self.mixture is not None:
            values |= self.mixture.metadata(config, sizes)
        return values | self.details(config, sizes)

    def tensors(self, config: Config) -> Iterator[TensorSpec]:
        """config.json -> the tensors to write, in file order."""
        sizes = self.sizes(config)
        for module in self.embeddings:
            yield from module.tensors(sizes)
        for i in range(sizes["layers"]):
            yield from self.tensors_of_layer(config, i, sizes)
        if self.output_norm is not None:
            yield from self.output_norm.tensors(sizes)
        for module in self.more_modules:
            yield from module.tensors(sizes)
        if self.head is not None and not self.is_tied(config):
            yield from self.head.tensors(sizes)

    def tensors_of_layer(self, config: Config, index: int, sizes: Sizes) -> Iterator[TensorSpec]:
        """config.json, index, sizes -> the tensors of a layer."""
        for module in self.layer(config, index):
            yield from module.in_layer(index, self.layers).tensors(sizes)
        yield from self.more_tensors(config, index, sizes)
        if self.mixture is not None:
            yield from self.mixture.bias_of(config, index, sizes)

    def predictor_tensors(self, config: Config) -> Iterator[TensorSpec]:
        """config.json -> the tensors of the layer for multi-token prediction, if there is one."""
        if self.predictor is None:
            return
        sizes = self.sizes(config)
        if self.predictor.is_listed:
            yield from self.tensors_of_layer(config, sizes["layers"], sizes)
        for module in self.predictor.modules(config, sizes["layers"]):
            yield from module.tensors(sizes)

    def ignores(self, config: Config, name: str) -> bool:
        """Whether a tensor that no module uses may be there.

        A tied checkpoint may repeat the embedding as head; some have layers that predict further
        tokens.
        """
        layer = re.match(rf"{re.escape(self.layers)}\.(\d+)\.", name)
        predicts = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers")
        if layer and predicts and int(layer[1]) >= dimension(config, "num_hidden_layers"):
            return True
        is_head = self.head is not None and name == f"{self.head.hf}.weight"
        return is_head or self.ignored.fullmatch(name) is not None

    def is_tied(self, config: Config) -> bool:
        """Whether the head is the embedding; an encoder has none."""
        if self.head is None:
            return True
        return flag(config, found_key(config, self.tied_keys), self.tied)

    def computed(self, config: Config) -> Mapping[str, Values]:
        """config.json -> tensors to write that are not in the checkpoint, by GGUF name."""
        if self.rotated is None:
            return {}
        return rope_tensors(config, self.rotated(config, self.sizes(config)))


def _size(config: Config, size: str, default: int | None = None) -> int:
    return dimension(config, found_key(config, _SIZE_KEYS[size]), default)
