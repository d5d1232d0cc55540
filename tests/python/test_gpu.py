"""Decode on a GPU: the same bits with and without overlap and graphs, near those of the CPU.

H2O_TEST_DEVICE=cuda pytest -m gpu tests/python/test_gpu.py. H2O_TEST_BRIEF=1 takes small models and
few steps, as on an emulated GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from h2o_cpp import Generator, Policy
from support.needs import CUDA
from support.outputs import left, only_some
from support.shapes import config
from support.synthetic import write_model

BRIEF = "H2O_TEST_BRIEF" in os.environ
# |logits - those of the CPU| / |those of the CPU|: prompts are multiplied in 8 bits there.
MOST_FROM_CPU = 0.05
SETTINGS: dict[str, dict[str, str]] = {
    "as it comes": {},
    "without overlap": {"H2O_CUDA_OVERLAP": "0"},
    "without graphs": {"H2O_CUDA_GRAPHS": "0"},
}

Logits = Mapping[str, NDArray[np.float32]]
Decode = Callable[[str, Mapping[str, str]], Logits]


@pytest.fixture(scope="module")
def decode(
    tmp_path_factory: pytest.TempPathFactory, tiny_opt: Path, llama: Path
) -> Callable[[str, Mapping[str, str]], Logits]:
    """Logits of a device with these variables, which are read when a process starts."""
    directory = tmp_path_factory.mktemp("decode")
    models = [llama] if BRIEF else [llama, tiny_opt]
    if not BRIEF:  # two layers of a 7B shape, whose kernels fill a GPU
        for type_name in ("F16", "Q4_K_M"):
            models.append(directory / f"{type_name}.gguf")
            shape = config("LLaMA-7B", num_hidden_layers=2, vocab_size=2048)
            write_model(models[-1], shape, type_name)

    def run(device: str, variables: Mapping[str, str]) -> Logits:
        to = directory / "logits.npz"
        program = Path(__file__).parent / "support" / "gpu_decode.py"
        subprocess.run(
            [sys.executable, program, device, "10" if BRIEF else "200", to, *models],
            check=True,
            env={**os.environ, **variables},
        )
        with np.load(to) as found:
            return dict(found)

    return run


@pytest.fixture(scope="module")
def plain(decode: Decode) -> Logits:
    """Logits on the GPU without overlap and graphs."""
    return decode("cuda", {"H2O_CUDA_OVERLAP": "0", "H2O_CUDA_GRAPHS": "0"})


@CUDA
@pytest.mark.parametrize("setting", SETTINGS)
def test_overlap_and_graphs_do_not_change_bits(decode: Decode, plain: Logits, setting: str) -> None:
    found = decode("cuda", SETTINGS[setting])
    assert found.keys() == plain.keys()
    for name, logits in found.items():
        assert np.array_equal(logits.view(np.uint32), plain[name].view(np.uint32)), name


@CUDA
def test_logits_are_near_those_of_the_cpu(decode: Decode, plain: Logits) -> None:
    for name, cpu in decode("cpu", {}).items():
        if name.endswith("full"):  # eviction may depend on rounding
            far = np.linalg.norm(plain[name] - cpu) / np.linalg.norm(cpu)
            assert far <= MOST_FROM_CPU, name


@CUDA
def test_drafts_change_nothing(llama: Path) -> None:
    """Drafts leave the output of one text as it is."""
    common: Any = {
        "device": "cuda", "policy": Policy.h2o(6, 5, 1), "n_ctx": 40, "n_batch": 16,
        "max_sequences": 1,
    }  # fmt: skip
    with (
        Generator(llama, **common) as plain,
        Generator(llama, draft="lookup", **common) as drafted,
        Generator(llama, draft=llama, draft_max=3, draft_tokens=9, **common) as guessing,
    ):
        for seed in range(2 if BRIEF else 20):
            prompt = [3 + seed, 4, 5] * 4
            options: dict[str, Any] = {
                "temperature": [0.0, 0.3][seed % 2], "seed": seed, "max_tokens": 26,
                "ignore_eos": True, "constraint": only_some,
            }  # fmt: skip
            expected = left(plain, prompt, options)
            assert left(drafted, prompt, options) == expected
            assert left(guessing, prompt, options) == expected
        with guessing.engine() as engine:
            assert engine.stats().drafted_tokens > 0
