"""Checkpoints as people have them: other names, shards without an index, wrappers, bare models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from h2o_cpp import Generator
from h2o_cpp.convert import convert
from support.needs import packages
from support.opt_checkpoint import read_tensors, write_json
from support.random_models import RECIPES, Recipe, make_model, save_checkpoint
from support.refused_conversion import assert_refused
from support.tokenizer_files import template

pytestmark = packages("torch", "transformers", "safetensors")

LLAMA = Recipe("Llama", 32, 4, 48, options={"num_key_value_heads": 2})
TIED = Recipe("Llama", 32, 4, 48, options={"tie_word_embeddings": True})
MIXTURES = [
    *("mixtral", "qwen2moe", "qwen3moe", "olmoe", "ernie4_5_moe", "glm4_moe", "solar_open"),
    *("dots1", "minimax_m2", "exaone_moe", "granitemoe", "qwen3next", "qwen35moe", "lfm2moe"),
]


def recipe_of(name: str) -> Recipe:
    if name in RECIPES:
        return RECIPES[name]
    from support.random_models import CONVOLUTIONS

    return CONVOLUTIONS[name]


def same_files(one: Path, other: Path) -> None:
    expected, found = read_tensors(one), read_tensors(other)
    assert found.keys() == expected.keys()
    for name, (kind, values) in expected.items():
        assert found[name][0] is kind
        np.testing.assert_array_equal(found[name][1], values, err_msg=name)


def of_mlx(name: str, tensor: Any) -> dict[str, Any]:
    """A tensor of transformers 5 by the names of mlx-lm."""
    if match := re.fullmatch(r"(.*)\.experts\.gate_up_proj", name):
        gate, up = tensor.chunk(2, dim=1)
        prefix = f"{match[1]}.switch_mlp"
        return {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
    renamed = re.sub(r"\.experts\.down_proj$", ".switch_mlp.down_proj.weight", name)
    return {renamed: tensor}


@pytest.mark.parametrize("layout", ["transformers 5", "MLX"])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_by_other_names(tmp_path: Path, name: str, layout: str) -> None:
    from safetensors.torch import save_file

    model = make_model(recipe_of(name), 1)
    save_checkpoint(model, tmp_path)
    convert(tmp_path, tmp_path / "hub.gguf", "f32")
    tensors: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        tensors |= of_mlx(key, value) if layout == "MLX" else {key: value}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    convert(tmp_path, tmp_path / "other.gguf", "f32")
    same_files(tmp_path / "hub.gguf", tmp_path / "other.gguf")


def without_index(weights: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    names = sorted(weights)
    for i, part in enumerate((names[:5], names[5:])):
        file = path / f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, file)
    (path / "model.safetensors").unlink()


def renamed(change: Callable[[str], str]) -> Callable[[dict[str, Any], Path], None]:
    def write(weights: dict[str, Any], path: Path) -> None:
        from safetensors.torch import save_file

        save_file({change(k): v for k, v in weights.items()}, path / "model.safetensors")

    return write


def nested(key: str) -> Callable[[dict[str, Any], Path], None]:
    def write(weights: dict[str, Any], path: Path) -> None:
        import torch

        torch.save({"epoch": 1, key: weights}, path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()

    return write


def config(**changes: object) -> Callable[[dict[str, Any], Path], None]:
    def write(weights: dict[str, Any], path: Path) -> None:
        settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
        write_json(path / "config.json", settings | changes)

    return write


@pytest.mark.parametrize(
    "change",
    [
        without_index,
        renamed(lambda name: f"module.{name}"),
        renamed(lambda name: f"_orig_mod.module.{name}"),
        renamed(lambda name: f"base_model.model.{name}"),
        renamed(lambda name: f"_forward_module.{name}"),
        renamed(lambda name: f"model.{name}"),
        renamed(lambda name: f"_orig_mod.model.{name}"),
        renamed(lambda name: name.replace(".mlp.", "._orig_mod.mlp.")),
        renamed(lambda name: name.replace(".mlp.", "._fsdp_wrapped_module.mlp.")),
        nested("state_dict"),
        nested("module"),
        config(hidden_act="swish"),
        config(architectures=None),
        config(architectures=["LlamaModel"]),
    ],
)
def test_the_same_model(tmp_path: Path, change: Callable[[dict[str, Any], Path], None]) -> None:
    from safetensors.torch import load_file

    save_checkpoint(make_model(LLAMA, 1), tmp_path)
    convert(tmp_path, tmp_path / "expected.gguf", "f32")
    change(load_file(tmp_path / "model.safetensors"), tmp_path)
    convert(tmp_path, tmp_path / "found.gguf", "f32")
    same_files(tmp_path / "expected.gguf", tmp_path / "found.gguf")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("consolidated.safetensors", "consolidated.safetensors: Mistral's or Meta's own layout"),
        ("consolidated.00.pth", "consolidated.00.pth: Mistral's or Meta's own layout"),
        ("weights.00.npz", "weights.00.npz: MLX's old layout; take the original checkpoint"),
        ("x-Q4_K_M.gguf", "x-Q4_K_M.gguf: GGUF already; run it"),
        ("adapter_model.safetensors", "adapter_model.safetensors: a LoRA adapter; merge it"),
        ("tf_model.h5", "tf_model.h5: TensorFlow's"),
        ("lora.safetensors", "lora.safetensors: no name of a checkpoint's file"),
    ],
)
def test_other_files_than_weights(tmp_path: Path, name: str, message: str) -> None:
    save_checkpoint(make_model(LLAMA, 1), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    assert_refused(tmp_path, message, FileNotFoundError)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_pointers(tmp_path: Path, name: str) -> None:
    save_checkpoint(make_model(LLAMA, 1), tmp_path)
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert_refused(tmp_path, f"{name}: a Git LFS pointer, without the data; run git lfs pull")


def test_tied_checkpoint_with_only_the_head(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_checkpoint(make_model(TIED, 1), tmp_path)
    convert(tmp_path, tmp_path / "expected.gguf", "f32")
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, tmp_path / "model.safetensors")
    convert(tmp_path, tmp_path / "found.gguf", "f32")
    same_files(tmp_path / "expected.gguf", tmp_path / "found.gguf")


def test_bare_model_has_no_head(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_checkpoint(make_model(LLAMA, 1), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(
        {k.removeprefix("model."): v for k, v in weights.items()}, tmp_path / "model.safetensors"
    )
    config(architectures=["LlamaModel"])({}, tmp_path)
    notes = convert(tmp_path, tmp_path / "bare.gguf", "f32")
    assert any("has no head" in note for note in notes)
    assert "output.weight" not in read_tensors(tmp_path / "bare.gguf")


def test_missing_shard(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save_checkpoint(make_model(LLAMA, 1), tmp_path)
    without_index(load_file(tmp_path / "model.safetensors"), tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert_refused(tmp_path, "found 1 of 2 shards model-*.safetensors")


def test_adapters(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_checkpoint(make_model(LLAMA, 1), tmp_path)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(1, 1)}, tmp_path / "model.safetensors")
    assert_refused(tmp_path, "a LoRA adapter; merge it")
    (tmp_path / "config.json").rename(tmp_path / "adapter_config.json")
    assert_refused(tmp_path, "a LoRA adapter; merge it")


@pytest.mark.parametrize(
    ("mode", "number"), [("mean_tokens", 1), ("cls_token", 2), ("lasttoken", 3)]
)
def test_pooling(tmp_path: Path, mode: str, number: int) -> None:
    save_checkpoint(make_model(LLAMA, 1), tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    modes = {
        f"pooling_mode_{one}": one == mode for one in ("mean_tokens", "cls_token", "lasttoken")
    }
    write_json(tmp_path / "1_Pooling" / "config.json", {"word_embedding_dimension": 32} | modes)
    convert(tmp_path, tmp_path / "model.gguf", "f32")
    field = GGUFReader(tmp_path / "model.gguf").fields["llama.pooling_type"]
    assert field.contents() == number
    # sentence-transformers 6 writes it so.
    new = {"mean_tokens": "mean", "cls_token": "cls"}.get(mode, mode)
    write_json(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": new})
    convert(tmp_path, tmp_path / "new.gguf", "f32")
    assert GGUFReader(tmp_path / "new.gguf").fields["llama.pooling_type"].contents() == number
    others: list[dict[str, Any]] = [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode": "max"},
        {"pooling_mode": ["mean", "cls"]},
    ]
    for other in others:
        write_json(tmp_path / "1_Pooling" / "config.json", other)
        assert_refused(tmp_path, "a GGUF file has mean, cls or last")


def test_modules_after_pooling_are_noted(tmp_path: Path) -> None:
    save_checkpoint(make_model(LLAMA, 1), tmp_path)
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    notes = convert(tmp_path, tmp_path / "model.gguf", "f32")
    assert "embeddings of the checkpoint also pass Dense, which the file lacks" in notes


class TestTokenizers:
    """Against tokenizers, which reads the same tokenizer.json."""

    def write(self, path: Path, **changes: object) -> None:
        save_checkpoint(make_model(LLAMA, 1), path)
        file = path / "tokenizer.json"
        document = json.loads(file.read_text(encoding="utf-8"))
        document["model"] |= {k: v for k, v in changes.items() if k in ("merges", "vocab")}
        document |= {k: v for k, v in changes.items() if k in ("added_tokens", "post_processor")}
        if "type" in changes:
            del document["model"]["type"]
        for token in document["added_tokens"]:
            flags = ("single_word", "lstrip", "rstrip", "normalized")
            token |= {key: False for key in flags if key not in token}
        document["pre_tokenizer"].setdefault("trim_offsets", False)
        write_json(file, document)

    @pytest.mark.parametrize("changes", [{}, {"type": None}, {"merges": []}])
    @pytest.mark.parametrize("tiktoken", [False, True])
    def test_ids(self, tmp_path: Path, changes: dict[str, Any], tiktoken: bool) -> None:
        from tokenizers import Tokenizer

        self.write(tmp_path, **changes)
        theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        if tiktoken:
            (tmp_path / "tokenizer.model").write_text("AA== 0\nAQ== 1\n", encoding="utf-8")
        settings = {"unk_token": "<oov>", "pad_token": "[PAD]", "eos_token": "</s>"}
        write_json(tmp_path / "tokenizer_config.json", settings)
        convert(tmp_path, tmp_path / "model.gguf", "f32")
        with Generator(tmp_path / "model.gguf", threads=1) as generator:
            for text in ("ab a", "abab", " a b", "ba"):
                ids = generator.tokenize(text, add_special=False)
                assert ids == theirs.encode(text, add_special_tokens=False).ids

    def test_single_word(self, tmp_path: Path) -> None:
        token = {"id": 9, "content": "cat", "special": False, "single_word": True}
        self.write(tmp_path, added_tokens=[token])
        assert_refused(tmp_path, "cat has single_word")

    def test_another_end_token_is_added(self, tmp_path: Path) -> None:
        """Qwen3-Embedding's tokenizer does so; llama.cpp's converter makes it eos, too."""
        self.write(tmp_path, post_processor=template([], ["</s>"]))
        write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<pad>"})
        convert(tmp_path, tmp_path / "model.gguf", "f32")
        with Generator(tmp_path / "model.gguf", threads=1) as generator:
            assert generator.tokenize("ab") == [7, 2]
            assert generator.tokenizer.end_tokens >= {1, 2}
