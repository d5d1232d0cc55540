"""Reads values of config.json, and refuses those that a GGUF file cannot express."""

from collections.abc import Iterable, Mapping
from typing import Any

Config = Mapping[str, Any]

Metadata = dict[str, bool | int | float | str | list[bool]]
"""Values by key without the architecture, or with `h2o.` for keys of our own."""


def dimension(config: Config, key: str, default: int | None = None) -> int:
    """A size such as hidden_size; the default stands for a missing key and for null.

    Raises ValueError unless it is a positive integer of 32 bits.
    """
    value = default if config.get(key) is None else config[key]
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
    """True or false; raises ValueError for anything else."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool):
        return value
    raise ValueError(f"config.json: {key} must be true or false, found {value!r}")


def refuse(architecture: str, key: str, value: object, why: str) -> ValueError:
    """The error for a value that a file of this architecture cannot express."""
    return ValueError(
        f"config.json: {key} is {value!r}: {why}; an `{architecture}` file cannot express this"
    )


def check_fixed(
    architecture: str, config: Config, fixed: Iterable[tuple[str, object, str]]
) -> None:
    """Refuses other values than the one given for each key, which is also HF's default.

    `fixed` has rows (key, value, what any other value means).
    """
    for key, expected, why in fixed:
        value = config.get(key, expected)
        if value != expected:
            raise refuse(architecture, key, value, why)
