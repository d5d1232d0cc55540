"""Validation of arguments."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from numbers import Integral, Real
from typing import Literal, TypeAlias, TypedDict

from h2o_cpp import _core

KvDType: TypeAlias = str | tuple[str, str]  # a type of K and V, or a pair
Positions: TypeAlias = Literal["auto", "original", "rolling"]

INT32_MAX = 2**31 - 1  # the core counts tokens in int32
INT64_MAX = 2**63 - 1  # and bytes in int64

_SIZE = "expected bytes or a size such as 4GiB or 512MB"

_UNITS = {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate(("", "K", "M", "G", "T"))
    for unit, base in (("B", 1000), ("iB", 1024))
    if prefix or unit == "B"
}


def check_int(name: str, value: object, least: int, most: int | None = INT32_MAX) -> int:
    """`value` as an int from `least` to `most`. Raises ValueError naming the argument."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is not None and least <= number and (most is None or number <= most):
        return number
    # Only a larger number needs to know what the core can count.
    bounded = most is not None and (most != INT32_MAX or (number is not None and number > most))
    limits = f"{least} to {most}" if bounded else f"{least} or more"
    raise ValueError(f"{name}={value!r}, expected an integer, {limits}")


def check_context(n_ctx: int | None, n_ctx_train: int, most: int = _core.DEFAULT_N_CTX) -> int:
    """A context length; 0: the trained length; None: the trained length, at most `most`."""
    if n_ctx is None:
        return min(n_ctx_train, most)
    number = check_int("n_ctx", n_ctx, 0)
    if number > n_ctx_train:
        raise ValueError(f"n_ctx={n_ctx}, expected at most the trained length, {n_ctx_train}")
    return number or n_ctx_train


def check_str(name: str, value: object) -> str:
    """`value` if it is a str. Raises TypeError naming the argument."""
    if not isinstance(value, str):
        raise TypeError(f"{name}={short(value)}, expected text (a str)")
    return value


def check_strings(name: str, value: object, expected: str = "a list of strings") -> Sequence[str]:
    """`value` if it is a list of strings. Raises TypeError naming the argument."""
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not all(isinstance(one, str) for one in value)
    ):
        raise TypeError(f"{name}={short(value)}, expected {expected}")
    return value


def check_bool(name: str, value: object) -> bool:
    """`value` as a bool. Raises TypeError naming the argument."""
    if isinstance(value, Collection) or value not in (False, True):  # an array is not comparable
        raise TypeError(f"{name}={short(value)}, expected True or False")
    return bool(value)


def short(value: object) -> str:
    """The repr of a value for error messages, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_float(name: str, value: object) -> float:
    """`value` as a float. Raises ValueError naming the argument."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    raise ValueError(f"{name}={value!r}, expected a number")


def thread_count(threads: int | None) -> int:
    """The core's thread count; 0 is one per core."""
    return 0 if threads is None else check_int("threads", threads, 1, 1024)


def check_positions(positions: object) -> Positions:
    """Raises ValueError for unknown positions."""
    if positions not in ("auto", "original", "rolling"):
        raise ValueError(f"positions={positions!r}, expected 'auto', 'original' or 'rolling'")
    return positions


class KvDTypes(TypedDict):
    """Arguments of the core for the types of K and V."""

    k_dtype: str
    v_dtype: str


def kv_dtypes(kv_dtype: KvDType) -> KvDTypes:
    """Makes it from one type for both, or a pair (K, V)."""
    k_dtype, v_dtype = dtype_pair("kv_dtype", kv_dtype)
    return {"k_dtype": k_dtype, "v_dtype": v_dtype}


def types_text(kv_dtype: KvDType) -> str:
    """One type, or two separated by a comma."""
    return kv_dtype if isinstance(kv_dtype, str) else ",".join(kv_dtype)


def dtype_pair(name: str, types: object) -> tuple[str, str]:
    """The types of K and V. Raises ValueError naming the argument."""
    both = [types, types] if isinstance(types, str) else types
    if isinstance(both, tuple | list) and [type(t) for t in both] == [str, str]:
        return both[0], both[1]
    raise ValueError(f"{name}={types!r}, expected a type or a pair of types (K, V)")


def bytes_of(name: str, size: int | str, least: int = 1) -> int:
    """A number of bytes: 4294967296 or "4294967296", "4GiB", "4096 MiB", "1.5GB".

    Raises ValueError.
    """
    n_bytes: object = size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(?:(\d{1,20})|(\d{1,20}(?:\.\d+)?)\s*([KMGT]?i?B))\s*", size)
        if match is None or match[3] not in (None, *_UNITS):
            raise ValueError(f"{name}={size!r}, {_SIZE}")
        n_bytes = int(match[1] or float(match[2]) * _UNITS[match[3]])
    try:
        return check_int(name, n_bytes, least, INT64_MAX)
    except ValueError:
        raise ValueError(f"{name}={size!r}, {_SIZE}") from None
