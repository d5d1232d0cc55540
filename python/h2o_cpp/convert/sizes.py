"""The sizes of a model, with the keys that different families use in config.json."""

from collections.abc import Mapping

from h2o_cpp.convert.config import Config, dimension, found_key, refuse

Sizes = Mapping[str, int]
"""The sizes of a model by the names that its modules use, such as embd and ff."""

# size -> keys in config.json
_KEYS = {
    "embd": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "ff": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "context": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
}


def read_sizes(
    architecture: str,
    config: Config,
    kv_heads: int | None,
    defaults: Sizes,
    has_mlp: bool = True,
) -> dict[str, int]:
    """The sizes that every family has.

    kv_heads: default: num_key_value_heads, or the number of query heads. defaults: for missing
    keys; ff_ratio is ff / embd. has_mlp: whether ff is one of them. Raises ValueError for
    inconsistent sizes.
    """
    embd, heads = _size(config, "embd"), _size(config, "heads")
    head = _head_size(architecture, config, embd, heads)
    if kv_heads is None:
        kv_heads = dimension(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        why = f"{heads} heads of Q cannot share them evenly"
        raise refuse(architecture, "num_key_value_heads", kv_heads, why)
    q, kv = heads * head, kv_heads * head
    sizes = {
        "vocab": dimension(config, "vocab_size"),
        "context": _size(config, "context", defaults.get("context")),
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
        "none": 0,
        "one": 1,
    }
    if has_mlp:
        ff = _size(config, "ff", embd * defaults["ff_ratio"] if "ff_ratio" in defaults else None)
        sizes |= {"ff": ff, "gate_and_up": 2 * ff}
    return sizes


def _size(config: Config, size: str, default: int | None = None) -> int:
    return dimension(config, found_key(config, _KEYS[size]), default)


def _head_size(architecture: str, config: Config, embd: int, heads: int) -> int:
    """head_dim, or embd / heads."""
    if config.get("head_dim") is not None:
        return dimension(config, "head_dim")
    if embd % heads:
        why = f"the heads do not divide the width {embd} evenly"
        raise refuse(architecture, found_key(config, _KEYS["heads"]), heads, why)
    return embd // heads
