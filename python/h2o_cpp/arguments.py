"""Checking what callers pass."""

from __future__ import annotations

from numbers import Integral

INT32_MAX = 2**31 - 1  # the core counts tokens in 32 bits


def whole(name: str, value: object, least: int, most: int | None = INT32_MAX) -> int:
    """`value` as an int from `least` to `most`; ValueError, naming the argument, otherwise."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if least <= number and (most is None or number <= most):
            return number
    limits = f"{least} or more" if most in (None, INT32_MAX) else f"{least} to {most}"
    raise ValueError(f"{name}={value!r}, expected a whole number, {limits}")
