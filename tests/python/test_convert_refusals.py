"""Errors of the converter about weights, tokenizers and outputs: each names the cause."""

import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from h2o_cpp.convert import convert
from h2o_cpp.convert.checkpoint import open_tensors
from support.needs import packages
from support.opt_checkpoint import (
    CONFIG,
    MERGES,
    TOKENS,
    make_checkpoint,
    random_weights,
    write_json,
    write_safetensors,
    write_shards,
    write_tokenizer_json,
)
from support.refused_conversion import assert_refused


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "tiny")
    return tmp_path / "tiny"


class Exploit:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@packages("torch")
def test_invalid_pytorch_files_are_rejected(checkpoint: Path, tmp_path: Path) -> None:
    import torch

    (checkpoint / "model.safetensors").unlink()
    weights = checkpoint / "pytorch_model.bin"
    exploit = Exploit(tmp_path / "exploited")
    for state in ({"a": exploit}, [1, 2], {"a": "text"}):
        torch.save(state, weights)
        assert_refused(checkpoint, "pytorch_model.bin: ")
    assert not exploit.path.exists()
    numbers = {name: torch.tensor(values).int() for name, values in random_weights(CONFIG).items()}
    torch.save(numbers, weights)
    assert_refused(checkpoint, "has an unsupported type, expected f64, f32, f16 or bf16")
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_refused(checkpoint, "pytorch_model.bin: not a readable PyTorch weights file")


def test_pytorch_files_need_torch(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert_refused(checkpoint, "pip install torch")


def test_wrong_tensors_are_rejected(checkpoint: Path, tmp_path: Path) -> None:
    for name, values, message in (
        ("decoder.layers.1.fc1.bias", None, "decoder.layers.1.fc1.bias is missing"),
        (
            "decoder.layers.1.fc1.bias",
            np.zeros((96, 1)),
            "has shape [96, 1], expected [96] by config.json",
        ),
        (
            "decoder.project_in.weight",
            np.zeros((64, 32)),
            "project_in.weight is unknown in architecture",
        ),
        ("decoder.embed_tokens.weight", np.full((12, 64), 1e6), "range of f16"),
    ):
        weights = random_weights(CONFIG)
        weights.pop(f"model.{name}", None)
        if values is not None:
            weights[f"model.{name}"] = values
        write_safetensors(checkpoint / "model.safetensors", weights)
        assert_refused(checkpoint, message)


def test_wrong_shards_are_rejected(checkpoint: Path, tmp_path: Path) -> None:
    weight_map = write_shards(checkpoint, ["a.safetensors", "b.safetensors"])
    index = checkpoint / "model.safetensors.index.json"
    write_json(index, {"weight_map": weight_map | {"more": "a.safetensors"}})
    assert_refused(checkpoint, "tensor more is not in shard a.safetensors")
    write_json(index, {"weight_map": {"x": "../tiny/a.safetensors"}})
    assert_refused(checkpoint, "weight_map")
    write_json(index, {"weight_map": weight_map})
    (checkpoint / "b.safetensors").unlink()
    assert_refused(checkpoint, "shard b.safetensors is missing")


@pytest.mark.parametrize(
    ("file", "error", "message"),
    [
        ("config.json", FileNotFoundError, "config.json: no such file"),
        ("model.safetensors", FileNotFoundError, "no weights"),
        ("merges.txt", FileNotFoundError, "no tokenizer"),
    ],
)
def test_missing_files(checkpoint: Path, file: str, error: type[Exception], message: str) -> None:
    (checkpoint / file).unlink()
    assert_refused(checkpoint, message, error)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("normalizer", {"type": "NFKC"}),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": []}),
        ("pre_tokenizer.use_regex", False),
        ("pre_tokenizer.add_prefix_space", True),
        ("model.type", "Unigram"),
        ("model.byte_fallback", True),
        ("model.ignore_merges", True),
        ("model.dropout", 0.1),
        ("model.end_of_word_suffix", "</w>"),
        ("model.vocab", ["a"]),
        ("model.merges", ["a b c"]),
        ("model.merges", ["a ab"]),  # aab is not a token
        ("added_tokens", [{"id": 4, "content": "</s>"}]),
        ("added_tokens", [{"id": 4, "content": "<new>"}]),
        ("added_tokens", ["<new>"]),
    ],
)
def test_unsupported_tokenizers_are_rejected(checkpoint: Path, key: str, value: object) -> None:
    write_tokenizer_json(checkpoint, {key: value})
    assert_refused(checkpoint, str(checkpoint))


def test_error_names_tokenizer_setting(checkpoint: Path) -> None:
    write_tokenizer_json(checkpoint, {"pre_tokenizer": {"type": "Whitespace"}})
    assert_refused(
        checkpoint,
        "tokenizer.json: llama.cpp has no name for normalizer null"
        ' and pre_tokenizer {"type": "Whitespace"} with ignore_merges false',
    )
    write_json(checkpoint / "tokenizer_config.json", {"bos_token": "<begin>"})
    write_tokenizer_json(checkpoint)
    assert_refused(checkpoint, "bos_token '<begin>' is not in the vocabulary")
    write_json(checkpoint / "tokenizer_config.json", {"add_prefix_space": True})
    assert_refused(checkpoint, "tokenizer_config.json: add_prefix_space is true")


def test_more_tokens_than_vocab_size_are_rejected(checkpoint: Path) -> None:
    write_json(checkpoint / "vocab.json", {token: i for i, token in enumerate(TOKENS)} | {"c": 12})
    assert_refused(checkpoint, "token ids 0 to 12, but config.json has vocab_size 12")


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("name", ["decoder.layers.0.fc1.weight", "decoder.final_layer_norm.bias"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1e300])
def test_non_finite_weights_are_rejected(
    checkpoint: Path, name: str, value: float, outtype: str
) -> None:
    """Includes a float64 value that overflows float32."""
    weights = {key: array.astype(np.float64) for key, array in random_weights(CONFIG).items()}
    weights[f"model.{name}"].flat[-1] = value
    write_safetensors(checkpoint / "model.safetensors", weights, dtype="F64")
    assert_refused(checkpoint, f"{name} has values that are NaN or infinite", outtype=outtype)


@pytest.mark.parametrize(
    ("outtype", "most"), [("f16", 65504), ("bf16", 2.0**128 - 2.0**120), ("q8_0", 127 * 65504)]
)
def test_weights_beyond_range_of_type_are_rejected(
    checkpoint: Path, outtype: str, most: float
) -> None:
    name = "decoder.layers.0.fc1.weight"
    weights = random_weights(CONFIG)
    weights[f"model.{name}"].flat[-1] = -most
    weights["model.decoder.final_layer_norm.bias"].flat[0] = np.finfo(np.float32).max  # stays f32
    write_safetensors(checkpoint / "model.safetensors", weights)
    convert(checkpoint, checkpoint / "most.gguf", outtype)
    (tensor, *_) = (t for t in GGUFReader(checkpoint / "most.gguf").tensors if "up.w" in t.name)
    assert np.isfinite(dequantize(tensor.data, tensor.tensor_type)).all()
    weights[f"model.{name}"].flat[-1] = np.nextafter(np.float32(most), np.float32(np.inf))
    write_safetensors(checkpoint / "model.safetensors", weights)
    assert_refused(checkpoint, f"beyond the range of {outtype}; use", outtype=outtype)


def test_malformed_merges_are_rejected(checkpoint: Path) -> None:
    (checkpoint / "merges.txt").write_bytes(b"\xff")
    assert_refused(checkpoint, "merges.txt: not UTF-8")
    (checkpoint / "merges.txt").write_text(f"{MERGES[0]}\nnonsense\n", encoding="utf-8")
    assert_refused(checkpoint, "merges.txt: malformed merge 'nonsense'")


def test_invalid_outputs_are_rejected(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: no such directory"):
        convert(checkpoint, tmp_path / "nowhere" / "out.gguf")
    with pytest.raises(ValueError, match="not a regular file"):
        convert(checkpoint, tmp_path)
    assert_refused(checkpoint, "unknown outtype 'q4_k'", outtype="q4_k")


def test_output_that_is_an_input_is_rejected(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by relative path, hard link or symbolic link."""
    weights = checkpoint / "model.safetensors"
    before = weights.read_bytes()
    monkeypatch.chdir(checkpoint)
    (tmp_path / "hard.gguf").hardlink_to(weights)
    (tmp_path / "soft.gguf").symlink_to(weights)
    (checkpoint / "beside.gguf").hardlink_to(weights)
    names = [weights, Path("model.safetensors"), Path("beside.gguf"), checkpoint / "config.json"]
    for output in (*names, tmp_path / "hard.gguf", tmp_path / "soft.gguf"):
        with pytest.raises(ValueError, match="a file of the checkpoint") as error:
            convert(checkpoint, output)
        assert str(error.value).startswith(f"{output}: the output is ")
    assert weights.read_bytes() == before
    Path("beside.gguf").unlink()
    for _ in range(2):  # another file in the checkpoint directory is fine
        convert(checkpoint, Path("beside.gguf"))


def test_corrupt_safetensors_are_rejected(tmp_path: Path) -> None:
    """Every truncation raises; a changed byte of the header raises or keeps shapes consistent."""
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": np.ones((2, 3)), "b": np.ones(4)})
    good = path.read_bytes()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors: not a readable"):
            open_tensors(tmp_path)
    for i in range(len(good) - 40):
        for byte in b'\x00\xff"9.-[{':
            path.write_bytes(good[:i] + bytes([byte]) + good[i + 1 :])
            try:
                tensors = open_tensors(tmp_path)
            except ValueError:
                continue
            for tensor in tensors.values():
                assert tensor.read is None or tensor.read().shape == tensor.shape
