"""The C library and the Python package give the same output and exchange snapshots."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator
from h2o_cpp.policy import POLICIES
from support.c_library import CSession
from support.needs import needs

PROMPT = "It was the best of times: naïve, 🦙 and dark. " * 20
OPTIONS: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.02,
    "repeat_penalty": 1.1,
    "repeat_last_n": 64,
}

pytestmark = needs("the C library (H2O_LIBRARY)", "H2O_LIBRARY" in os.environ)


@pytest.fixture
def library() -> Path:
    """The path of libh2o.so, from H2O_LIBRARY."""
    return Path(os.environ["H2O_LIBRARY"]).resolve()


@pytest.mark.parametrize("hh", [None, 0.05, 100])
@pytest.mark.parametrize("seed", [0, 42])
def test_c_and_python_generate_same_text(
    library: Path, tiny_opt: Path, hh: float | None, seed: int
) -> None:
    in_c = CSession(library, tiny_opt, hh=hh or 0)
    in_c.set_sampling(**OPTIONS, seeded=1, seed=seed)
    python = Generator(tiny_opt, hh=hh, device="cpu").generate(
        PROMPT, max_tokens=100, seed=seed, **OPTIONS
    )
    assert in_c.stream(PROMPT, max_tokens=100) == python.text


def test_c_and_python_exchange_snapshots(library: Path, tiny_opt: Path, tmp_path: Path) -> None:
    in_c = CSession(library, tiny_opt, hh=0.05)
    in_c.set_sampling(**OPTIONS)
    generator = Generator(tiny_opt, hh=0.05)
    stream = generator.stream(PROMPT, max_tokens=20, seed=7, **OPTIONS)
    list(stream)
    saved = stream.save()
    in_c.load(saved.data)
    stream = generator.stream(" and", after=saved, max_tokens=50, **OPTIONS)
    assert in_c.stream(" and", max_tokens=50) == "".join(stream)
    # The C snapshot also has the logits. Both continue identically from their random states.
    saved_in_c = tmp_path / "c.snapshot"
    saved_in_c.write_bytes(in_c.save())
    snapshots = [stream.save(), generator.load(saved_in_c)]
    first, second = (
        generator.generate(" so", after=snapshot, max_tokens=50, **OPTIONS).text
        for snapshot in snapshots
    )
    assert first == second != ""


@pytest.mark.parametrize(
    "budget",
    [
        {"hh": 5000},  # more than n_ctx: the full cache
        {"hh": 1000},
        {"hh": 0.29},
        {"hh": 50, "recent": 0.01},
        {"hh": 1.0, "recent": 0.25},
        {"hh": 5000, "policy": "window"},
        *({"hh": 20, "policy": name} for name in POLICIES),
    ],
    ids=str,
)
def test_budgets_are_the_same_in_c_and_python(
    library: Path, tiny_opt: Path, budget: dict[str, Any]
) -> None:
    """A cache takes a snapshot of its own policy only."""
    generator = Generator(tiny_opt, n_ctx=1000, **budget)
    stream = generator.stream("The old man", max_tokens=40, seed=1)
    list(stream)
    in_c = dict(budget)
    if "policy" in in_c:
        in_c["policy"] = in_c["policy"].encode()
    CSession(library, tiny_opt, n_ctx=1000, **in_c).load(stream.save().data)
