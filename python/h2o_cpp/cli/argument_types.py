"""Converters for argparse's `type`."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from h2o_cpp.budget.stored_budget import Budget


def names(text: str) -> list[str]:
    """Without repetitions, like fractions()."""
    return [*dict.fromkeys(text.split(","))]


def fractions(text: str) -> list[float]:
    try:
        return [*dict.fromkeys(_fraction(part) for part in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError("expected fractions such as 0.1,0.2") from None


def shares(text: str) -> list[float] | Literal["auto"]:
    """Fractions or "auto"."""
    return "auto" if text == "auto" else fractions(text)


def _fraction(text: str) -> float:
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def kv_types(text: str) -> str | tuple[str, str]:
    """One type ("q8_0") or a pair of types for K and V ("q8_0,q4_0")."""
    k, comma, v = text.lower().partition(",")
    return (k, v) if comma else k


def protected(text: str) -> str | int | tuple[int, int] | None:
    """ "prompt", "system", "auto", "none", or numbers of first and last tokens ("64", "64,16")."""
    if text in ("prompt", "system", "auto"):
        return text
    if text == "none":
        return None
    first, comma, last = text.partition(",")
    return (integer(first), integer(last)) if comma else integer(first)


def draft_source(text: str) -> str | None:
    """The source of drafts: "lookup" or "mtp", or llama.cpp's names of them; a model; "none"."""
    return {"ngram-simple": "lookup", "draft-mtp": "mtp", "none": None}.get(text, text)


def gguf_output(text: str) -> Path:
    """A file to write, which cannot be stdout."""
    if text == "-":
        raise argparse.ArgumentTypeError("a GGUF file cannot be written to stdout, give a file")
    return Path(text)


def seed(text: str) -> int | None:
    """A seed; -1 is a random one, as in llama.cpp."""
    given = integer(text)
    return None if given == -1 else given


def json_object(text: str) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


def context(text: str) -> int:
    """A number of tokens; "8k" is 8192."""
    thousands = text[:-1] if text[-1:] in ("k", "K") else ""
    return int(thousands) * 1024 if thousands.isdecimal() else integer(text)


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def budget(text: str) -> Budget:
    """An amount or "auto"."""
    return "auto" if text == "auto" else amount(text)


def amount(text: str) -> float:
    """A number of tokens ("400") or a fraction ("0.2", "20%")."""
    for kind in (int, _fraction):
        with suppress(ValueError):
            return kind(text)
    raise argparse.ArgumentTypeError(
        "expected a fraction such as 0.2 or a number of tokens such as 400"
    )
