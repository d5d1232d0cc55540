"""Options of a Generator in a Ray actor."""

from __future__ import annotations

from typing import Any

_MAX_SEQUENCES = 8


def actor_options(num_cpus: float, num_gpus: float, options: dict[str, Any]) -> dict[str, Any]:
    """Options that limit a Generator to its actor's resources."""
    given: dict[str, Any] = {
        "threads": max(1, int(num_cpus)),
        "device": "auto" if num_gpus else "cpu",
    }
    if "memory" not in options:
        given["max_sequences"] = _MAX_SEQUENCES
    return {**given, **options}
