"""Checkpoints with an encoder of images: only the text model is converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Generator
from h2o_cpp.convert import convert
from support.needs import packages
from support.opt_checkpoint import write_tokenizer_json
from support.random_models import (
    N_CTX,
    N_VOCAB,
    Recipe,
    float32_tolerance,
    random_tokens,
    randomize,
    reference_logits,
)

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "vocab_size": N_VOCAB,
    "max_position_embeddings": N_CTX,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
ENCODER = {"hidden_size": 16, "intermediate_size": 16}
SIGLIP = {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN = {"depth": 1, "num_heads": 2, "out_hidden_size": 32}

# class of transformers -> options of the text model and of the encoder
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3": ({"head_dim": 10, "sliding_window": 6}, SIGLIP | {"num_hidden_layers": 1}),
    "Mistral3": (
        {"model_type": "mistral", "head_dim": 12, "sliding_window": None},
        SIGLIP | {"model_type": "pixtral", "num_hidden_layers": 1},
    ),
    "Qwen2VL": (
        {"rope_parameters": SECTIONS},
        {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32},
    ),
    "Qwen2_5_VL": ({"rope_parameters": SECTIONS}, QWEN),
    "Qwen3VL": (
        {"rope_parameters": SECTIONS, "head_dim": 8},
        QWEN | {"deepstack_visual_indexes": [0]},
    ),
}
reference = packages("torch", "transformers")


def make_model(name: str) -> Any:
    import transformers

    text, vision = MODELS[name]
    more = {"mm_tokens_per_image": 4} if name == "Gemma3" else {}
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT | text, vision_config=ENCODER | vision, **more
    )
    return randomize(getattr(transformers, f"{name}ForConditionalGeneration")(config), seed=3)


@reference
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path)
    write_tokenizer_json(tmp_path)
    notes = convert(tmp_path, tmp_path / "model.gguf", "f32")
    assert notes[0] == "only the model of text is converted, not the encoder of images"
    tokens = random_tokens(1)
    expected = reference_logits(model, tokens)
    with Generator(tmp_path / "model.gguf", kv_dtype="f32") as generator:
        logits = generator.logits(tokens)
    tolerance = float32_tolerance(Recipe(name, 32, 4, 40, n_layers=3), expected)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)


@reference
def test_keys_that_text_config_lacks(tmp_path: Path) -> None:
    """As in Google's Gemma 3: sizes that equal the class's defaults are left out."""
    model = make_model("Gemma3")
    model.save_pretrained(tmp_path)
    write_tokenizer_json(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    for key in ("layer_types", "rope_parameters", "rms_norm_eps", "tie_word_embeddings"):
        text.pop(key)
    config["eos_token_id"] = text.pop("eos_token_id")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    tokens = random_tokens(1)
    expected = reference_logits(model, tokens)
    with Generator(tmp_path / "model.gguf", kv_dtype="f32") as generator:
        logits = generator.logits(tokens)
        assert generator.tokenizer.chat_template == "{{ messages }}"
    tolerance = float32_tolerance(Recipe("Gemma3", 32, 4, 40, n_layers=3), expected)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)


@reference
def test_another_text_model_is_refused(tmp_path: Path) -> None:
    make_model("Mistral3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "mistral4"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model_type is 'mistral4': the text model is another"):
        convert(tmp_path, tmp_path / "model.gguf", "f32")
