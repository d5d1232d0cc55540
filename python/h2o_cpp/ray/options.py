"""What a Generator gets in an actor of Ray."""

from __future__ import annotations

from typing import Any

_MAX_SEQUENCES = 8


def actor_options(num_cpus: float, num_gpus: float, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a Generator that takes what Ray has put aside for its actor, and no more."""
    given: dict[str, Any] = {
        "threads": max(1, int(num_cpus)),
        "device": "auto" if num_gpus else "cpu",
    }
    if "memory" not in options:
        given["max_sequences"] = _MAX_SEQUENCES
    return {**given, **options}
