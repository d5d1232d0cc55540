"""Checkpoints with an encoder of images: only the text model is converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType
from numpy.typing import NDArray

from h2o_cpp import Generator
from h2o_cpp.convert import convert
from support.changed_gguf import changed
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
    """Google's Gemma 3 has it: sizes that equal the class's defaults are left out."""
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
    config["text_config"]["model_type"] = "llama4_text"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model_type is 'llama4_text': the text model is another"):
        convert(tmp_path, tmp_path / "model.gguf", "f32")


OLLAMA_NAMES = {"Qwen2_5_VL": "qwen25vl"}


@reference
@pytest.mark.parametrize("name", MODELS)
def test_files_with_the_encoder_inside(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ollama's: the text model is loaded, and the rest is named."""
    model = make_model(name)
    model.save_pretrained(tmp_path)
    write_tokenizer_json(tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    file = GGUFReader(tmp_path / "model.gguf")
    old = file.fields["general.architecture"].contents()
    new = OLLAMA_NAMES.get(name, old)
    keys: dict[str, tuple[Any, GGUFValueType]] = {
        f"{new}.vision.block_count": (1, GGUFValueType.UINT32),
        f"{new}.vision.image_mean": ([0.5, 0.5], GGUFValueType.ARRAY),
        f"{new}.mm.tokens_per_image": (4, GGUFValueType.UINT32),
        f"{new}.image_token_index": (7, GGUFValueType.UINT32),
    }
    without = [f"{old}.rope.dimension_sections"]
    if name == "Gemma3":  # without what is always the same, with a token of images
        without += [f"{old}.attention.layer_norm_rms_epsilon", f"{old}.rope.freq_base"]
        without += [f"{old}.rope.freq_base_swa"]
        keys[f"{new}.rope.local.freq_base"] = (10000.0, GGUFValueType.FLOAT32)
        for part, value in (("tokens", "<image>"), ("token_type", 3), ("scores", 0.0)):
            key = f"tokenizer.ggml.{part}"
            if key in file.fields:
                keys[key] = ([*file.fields[key].contents(), value], GGUFValueType.ARRAY)
    encoder: dict[str, NDArray[np.float32]] = {
        "v.blk.0.attn_q.weight": np.zeros((8, 8), np.float32),
        "mm.0.bias": np.zeros(8, np.float32),
    }
    path = changed(tmp_path / "model.gguf", tmp_path / "inside.gguf", keys, encoder, new, without)
    tokens = random_tokens(1)
    with Generator(tmp_path / "model.gguf", kv_dtype="f32") as generator:
        expected = generator.logits(tokens)
    assert "encoder" not in caplog.text
    with Generator(path, kv_dtype="f32") as generator:
        np.testing.assert_array_equal(generator.logits(tokens), expected)
    assert "the encoder of images or sound inside ('v.blk.0.attn_q.weight'" in caplog.text


@reference
@pytest.mark.parametrize(
    ("name", "llama_cpp", "ollama", "without"),
    [
        (
            "Gemma3",
            {
                "attention.sliding_window_pattern": 3,
                "context_length": 131072,
                "rope.scaling.type": "linear",
                "rope.scaling.factor": 8.0,
            },
            {"attention.sliding_window_pattern": 3, "context_length": 131072},
            ["attention.layer_norm_rms_epsilon"],
        ),
        (
            "Mistral3",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 8,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
                "rope.scaling.yarn_log_multiplier": 0.5,
                "attention.temperature_scale": 0.25,
            },
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 8,
                "rope.scaling.beta_fast": 16.0,
                "rope.scaling.beta_slow": 2.0,
                "rope.scaling.mscale_all_dim": 0.5,
                "rope.scaling_beta": 0.25,
            },
            [],
        ),
    ],
)
def test_other_names_of_keys(
    tmp_path: Path,
    name: str,
    llama_cpp: dict[str, Any],
    ollama: dict[str, Any],
    without: list[str],
) -> None:
    make_model(name).save_pretrained(tmp_path)
    write_tokenizer_json(tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    prefix = name.lower()
    kinds = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
    found = []
    plain = {key: value for key, value in llama_cpp.items() if key.startswith("attention.sliding")}
    for i, (values, missing) in enumerate(((plain, []), (llama_cpp, []), (ollama, without))):
        keys = {f"{prefix}.{key}": (value, kinds[type(value)]) for key, value in values.items()}
        file = tmp_path / f"{i}.gguf"
        changed(
            tmp_path / "model.gguf", file, keys, {}, without=[f"{prefix}.{key}" for key in missing]
        )
        with Generator(file, kv_dtype="f32", n_ctx=40) as generator:
            found.append(generator.logits(random_tokens(1)))
    np.testing.assert_array_equal(found[1], found[2])
    assert (found[0] != found[1]).any()
