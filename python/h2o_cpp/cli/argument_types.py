"""What the values of options are, as argparse's `type`."""

from __future__ import annotations

import argparse

from h2o_cpp.model.stored_budget import Budget


def names(text: str) -> list[str]:
    """A list of names, as an argument."""
    return text.split(",")


def fractions(text: str) -> list[float]:
    """A list of fractions, as an argument."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError("expected fractions such as 0.1,0.2") from None


def kv_types(text: str) -> str | tuple[str, str]:
    """One type ("q8_0") or two ("q8_0,q4_0")."""
    k, comma, v = text.partition(",")
    return (k, v) if comma else k


def seed(text: str) -> int | None:
    """A seed; -1, as llama.cpp has it, is a different one each time."""
    number = integer(text)
    return None if number == -1 else number


def size(text: str) -> int | str:
    """Bytes, or a size such as 4GiB."""
    return int(text) if text.isascii() and text.isdigit() else text


def integer(text: str) -> int:
    """A whole number, as an argument."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


def budget(text: str) -> Budget:
    """An amount, or what the file recommends."""
    return "auto" if text == "auto" else amount(text)


def amount(text: str) -> float:
    """A number of tokens if it is an integer ("400"), otherwise a fraction ("0.2")."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            "expected a fraction such as 0.2 or a number of tokens such as 400"
        ) from None
