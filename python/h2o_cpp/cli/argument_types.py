"""Converters for argparse's `type`."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Literal

from h2o_cpp.model.stored_budget import Budget


def names(text: str) -> list[str]:
    """Without repetitions, like fractions()."""
    return [*dict.fromkeys(text.split(","))]


def fractions(text: str) -> list[float]:
    try:
        return [*dict.fromkeys(float(part) for part in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError("expected fractions such as 0.1,0.2") from None


def shares(text: str) -> list[float] | Literal["auto"]:
    """Fractions or "auto"."""
    return "auto" if text == "auto" else fractions(text)


def kv_types(text: str) -> str | tuple[str, str]:
    """One type ("q8_0") or a pair of types for K and V ("q8_0,q4_0")."""
    k, comma, v = text.partition(",")
    return (k, v) if comma else k


def gguf_output(text: str) -> Path:
    """A file to write, which cannot be stdout."""
    if text == "-":
        raise argparse.ArgumentTypeError("a GGUF file cannot be written to stdout, give a file")
    return Path(text)


def seed(text: str) -> int | None:
    """A seed; -1 is a random one, as in llama.cpp."""
    given = integer(text)
    return None if given == -1 else given


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def budget(text: str) -> Budget:
    """An amount or "auto"."""
    return "auto" if text == "auto" else amount(text)


def amount(text: str) -> float:
    """A number of tokens ("400") or a fraction ("0.2")."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    raise argparse.ArgumentTypeError(
        "expected a fraction such as 0.2 or a number of tokens such as 400"
    )
