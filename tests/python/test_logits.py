"""Logits equal Hugging Face transformers': golden ones, and new ones if it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator
from h2o_cpp.convert import convert
from support.converted_files import make_file
from support.needs import packages
from support.random_models import (
    RECIPES,
    float32_tolerance,
    make_model,
    random_tokens,
    reference_logits,
)
from support.rounded_weights import check_rounded_weights

# Several families and odd shapes; committed, so that no other package is needed.
GOLDEN = [
    "opt_odd_heads",
    "opt_untied",
    "opt_head_dim_one",
    "llama_gqa2_tied",
    "gptneox",
    "qwen3",
    "qwen3moe",
    "gemma2",
    "bloom",
    "gemma4",
    "gemma4_shared",
    "qwen35_listed",
    "lfm2",
]


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_equal_golden(data: Path, name: str, exact_device: str) -> None:
    golden = np.load(data / "golden" / f"{name}.npz")
    path = data / "golden" / f"{name}.gguf"
    with Generator(path, kv_dtype="f32", device=exact_device) as generator:
        logits = generator.logits(golden["tokens"])
    tolerance = float32_tolerance(RECIPES[name], golden["logits"])
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=tolerance)


reference = packages("torch", "transformers")


@reference
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", RECIPES)
def test_logits_equal_transformers(tmp_path: Path, name: str, seed: int, exact_device: str) -> None:
    recipe = RECIPES[name]
    model = make_model(recipe, 100 + seed)
    path = make_file(model, tmp_path)
    if exact_device != "cpu" and name.startswith(("llama4", "phimoe")):
        with pytest.raises(ValueError, match="does not support; use device=cpu"):
            Generator(path, device=exact_device)
        return
    tokens = random_tokens(seed)
    expected = reference_logits(model, tokens)
    with Generator(path, kv_dtype="f32", device=exact_device) as generator:
        logits = generator.logits(tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=float32_tolerance(recipe, expected))


@reference
@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("name", ["opt", "llama", "gptneox", "qwen2", "qwen3"])
def test_rounded_weights_change_logits_within_bound(
    tmp_path: Path, name: str, outtype: str
) -> None:
    check_rounded_weights(tmp_path, RECIPES[name], outtype, seed=7)


@reference
@pytest.mark.parametrize(
    ("checkpoint", "text", "n_prompt"),
    [
        ("tiny-opt-hf", "robert-louis-stevenson_treasure-island.txt", 100),
        ("stories260K", "tinystories_sample_197k.txt", 40),
    ],
)
def test_trained_model_equals_transformers_on_held_out_text(
    shared: Path,
    tmp_path: Path,
    checkpoint: str,
    text: str,
    n_prompt: int,
) -> None:
    """Logits within 1e-3 and the same greedy continuation for 200 tokens."""
    import torch
    import transformers

    source = shared / "models" / checkpoint
    convert(source, tmp_path / "model.gguf", "f32")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    page_of_text = (shared / "text" / text).read_text(encoding="utf-8")[20_000:24_000]

    with Generator(tmp_path / "model.gguf", kv_dtype="f32") as generator:
        page = generator.tokenize(page_of_text)[: generator.stats().n_ctx]
        with torch.no_grad():
            expected = model(torch.tensor([page])).logits[0].numpy()
        assert np.abs(generator.logits(page) - expected).max() < 1e-3

        prompt = page[:n_prompt]
        greedy = model.generate(
            torch.tensor([prompt]), max_new_tokens=200, min_new_tokens=200, do_sample=False
        )
        stream = generator.stream(prompt, max_tokens=200, temperature=0, ignore_eos=True)
        generated = "".join(stream)
        assert stream.tokens.tolist() == greedy[0, n_prompt:].tolist()
        assert generator.detokenize(prompt) + generated == generator.detokenize(
            [*prompt, *stream.tokens]
        )
