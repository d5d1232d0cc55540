"""Reading metadata with its types checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Metadata = Mapping[str, Any]

_REQUIRED = object()


def get(metadata: Metadata, key: str, kind: type, default: Any = _REQUIRED) -> Any:
    """The value of `key`, of type `kind`; without a default it must be there."""
    value = metadata.get(key, default)
    if value is _REQUIRED:
        raise ValueError(f"{key} is missing")
    if value is not default and not isinstance(value, kind):
        raise ValueError(f"{key} is a {type(value).__name__}, expected {kind.__name__}")
    return value


def get_array(metadata: Metadata, key: str, kind: type, default: Any = _REQUIRED) -> Any:
    """An array whose elements are all of type `kind`."""
    values = get(metadata, key, list, default)
    for value in values:
        if not isinstance(value, kind):
            raise ValueError(f"{key} has a {type(value).__name__}, expected {kind.__name__}")
    return values


def get_token(metadata: Metadata, name: str, n_vocab: int, default: int | None) -> int | None:
    """tokenizer.ggml.`name`_token_id."""
    key = f"tokenizer.ggml.{name}_token_id"
    token: int | None = get(metadata, key, int, default)
    if token is not None and not 0 <= token < n_vocab:
        raise ValueError(f"{key} is {token}, the vocabulary has {n_vocab} tokens")
    return token
