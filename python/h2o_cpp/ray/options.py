"""Options of a Generator in a Ray actor."""

from __future__ import annotations

from typing import Any


def actor_options(num_cpus: float, num_gpus: float, options: dict[str, Any]) -> dict[str, Any]:
    """Options that limit a Generator to its actor's resources."""
    device = "auto" if num_gpus else "cpu"
    return {"threads": max(1, int(num_cpus)), "device": device, **options}
