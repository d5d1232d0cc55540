"""Marks for tests with requirements; without them, the tests are not collected."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

from h2o_cpp import _core

# "auto" is the CPU, which most tests compare bit by bit. With H2O_TEST_DEVICE=cuda, tests with the
# fixture `device` also run on a GPU.
if os.environ.get("H2O_TEST_DEVICE") != "cuda":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Checkpoints and texts that are too large for the repository, for the fixture `shared`.
SHARED = Path(os.environ.get("H2O_SHARED", Path(__file__).resolve().parents[4] / "shared"))


def needs(what: str, there: bool) -> pytest.MarkDecorator:
    """For a test that needs `what`, shown in the summary."""
    return pytest.mark.skipif(not there, reason=what)


def packages(*names: str) -> pytest.MarkDecorator:
    """For a test that needs packages of this project's extras."""
    return needs("optional packages", all(importlib.util.find_spec(name) for name in names))


def programs(*names: str) -> pytest.MarkDecorator:
    """For a test that runs other programs."""
    return needs("other programs", all(shutil.which(name) for name in names))


LINUX = needs("Linux", sys.platform.startswith("linux"))
CUDA = needs("a CUDA device (H2O_TEST_DEVICE=cuda)", _core.cuda_device_count() > 0)
# AddressSanitizer maps terabytes and delays freeing of memory.
PLAIN_MEMORY = needs("no AddressSanitizer", "asan" not in os.environ.get("LD_PRELOAD", ""))
