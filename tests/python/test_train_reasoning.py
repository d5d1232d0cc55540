"""The trainer of the model of `h2o-cpp reasoning`: its model is the one that h2o.cpp reads."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator
from h2o_cpp.cli import main
from h2o_cpp.eval.reasoning.problems import FAMILIES, make_problem
from support.needs import packages

pytestmark = packages("torch", "safetensors", "tokenizers", "gguf")


@pytest.fixture(scope="module")
def trainer() -> Any:
    """The script as a module."""
    path = Path(__file__).parents[2] / "tools" / "train_reasoning"
    loader = SourceFileLoader("train_reasoning", str(path))
    module = module_from_spec(spec_from_loader("train_reasoning", loader))  # type: ignore[arg-type]
    sys.modules["train_reasoning"] = module  # for its dataclass
    loader.exec_module(module)
    return module


def test_trained_model_is_the_converted_one(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of training, a checkpoint, and the logits of its GGUF file."""
    import torch

    arguments = ["train_reasoning", str(tmp_path), "--steps", "2", "--tokens", "200"]
    monkeypatch.setattr(sys, "argv", arguments)
    trainer.main()
    file = tmp_path / "model.gguf"
    assert main(["convert", str(tmp_path), "-o", str(file), "--outtype", "f32"]) == 0
    weights = trainer.load_file(tmp_path / "model.safetensors")
    with Generator(file, threads=1, kv_dtype="f32") as generator:
        for family in FAMILIES:
            problem = make_problem(family, Random(0), 100)
            tokens = [trainer.IDS[c] for c in (trainer.END, *problem.prompt, *problem.trace)]
            assert generator.tokenize(problem.prompt + problem.trace) == tokens
            every = torch.ones(1, len(tokens), dtype=torch.bool)
            expected = trainer.logits_of(weights, torch.tensor([tokens]), every)
            np.testing.assert_allclose(generator.logits(tokens), expected, atol=0.02)


def test_mistakes_keep_problems_short(trainer: Any) -> None:
    import torch

    task = trainer.Task("walk", length=100.0, mistakes=0.0)
    wrong = torch.zeros(10, dtype=torch.bool)
    task.count(wrong, torch.arange(10) // 5, 2, 1000)
    assert (task.length, task.solved, task.problems) == (102, 2, 2)
    wrong[7] = True  # of the second problem
    task.count(wrong, torch.arange(10) // 5, 2, 103)
    assert (task.length, task.solved, task.problems) == (103, 3, 4)
    wrong[:] = True
    task.count(wrong, torch.arange(10) // 5, 2, 1000)
    assert (task.length, task.solved) == (103, 3)


def test_problems_of_a_step(trainer: Any) -> None:
    """Only traces and their ends are predicted."""
    x, predicted = trainer.Task("machine", length=200.0).batch(Random(1), 1000)
    assert x.shape == predicted.shape
    random = Random(1)
    random.random()
    for row, marks in zip(x.tolist(), predicted.tolist(), strict=True):
        text = "".join(trainer.TOKENS[id] for id in row).removeprefix(trainer.END)
        prompt, found = text.split("=", 1)
        begin = 1 + len(prompt) + 1
        assert marks.index(True) == begin
        assert sum(marks) == found.index(trainer.END) + 1
        assert not any(marks[begin + sum(marks) :])
