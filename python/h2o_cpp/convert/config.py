"""Values of config.json, and errors for those that GGUF cannot express."""

from collections.abc import Mapping, Sequence
from typing import Any

Config = Mapping[str, Any]

Value = bool | int | float | str | list[bool] | list[int] | list[float]
Metadata = dict[str, Value]
"""Values by key without the architecture, or with `h2o.` for keys of our own."""

Fixed = tuple[tuple[str, object, str], ...]
"""Rows: a key, its only value that GGUF can express (HF's default), the meaning of others."""


def found_key(config: Config, keys: Sequence[str]) -> str:
    """The first of the keys that config.json has, or else the first."""
    return next((key for key in keys if config.get(key) is not None), keys[0])


def dimension(config: Config, key: str, default: int | None = None) -> int:
    """A size such as hidden_size; default: for a missing key or null.

    It may be a list with one value for every layer, if they are the same.
    Raises ValueError unless it is an integer from 1 to 2^31 - 1.
    """
    value = default if config.get(key) is None else config[key]
    match value:
        case [first, *others] if all(other == first for other in others):
            value = first
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ValueError(
            f"config.json: {key} must be an integer from 1 to 2^31 - 1, found {value!r}"
        )
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """A number such as rms_norm_eps; raises ValueError unless it is positive."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise ValueError(f"config.json: {key} must be a positive number, found {value!r}")
    return float(value)


def flag(config: Config, key: str, default: bool) -> bool:
    """A boolean. Raises ValueError for anything else."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool):
        return value
    raise ValueError(f"config.json: {key} must be true or false, found {value!r}")


def layer_flags(config: Config, kinds: Mapping[str, bool]) -> list[bool]:
    """The flags of the layers' kinds in `layer_types`. Raises ValueError if it is invalid."""
    found, n_layers = config.get("layer_types"), dimension(config, "num_hidden_layers")
    if not isinstance(found, list) or len(found) != n_layers or not set(found) <= kinds.keys():
        raise ValueError(
            f"config.json: layer_types must name one of {', '.join(kinds)} for each of"
            f" {n_layers} layers, found {found!r}"
        )
    return [kinds[kind] for kind in found]


def refuse(architecture: str, key: str, value: object, why: str) -> ValueError:
    """The error for a value that this architecture's GGUF files cannot express."""
    return ValueError(
        f"config.json: {key} is {value!r}: {why}; an `{architecture}` file cannot express this"
    )


def check_fixed(architecture: str, config: Config, fixed: Fixed) -> None:
    """Raise ValueError for other values; null is the same as false, 0 or an empty list."""
    for key, expected, why in fixed:
        value = config.get(key, expected)
        if value != expected and (expected or value is not None):
            raise refuse(architecture, key, value, why)
