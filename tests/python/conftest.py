"""Fixtures shared by the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def data() -> Path:
    """Small files that the tests always need."""
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def tiny_opt() -> Path:
    """The bundled model."""
    return ROOT / "models" / "tiny-opt.gguf"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Checkpoints and texts too large for the repository, where they are to be had."""
    path = Path(os.environ.get("H2O_SHARED", ROOT.parent / "shared"))
    if not path.is_dir():
        pytest.skip("no shared models and texts beside the project (H2O_SHARED)")
    return path
