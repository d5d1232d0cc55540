"""Files that people take for models: one sentence says what they are, and what to take instead."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType
from numpy.typing import NDArray

from h2o_cpp import Generator
from support.changed_gguf import changed

TEXT = GGUFValueType.STRING
U32 = GGUFValueType.UINT32


def refused(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Generator(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.type": "mmproj"}, r"an encoder of images or sound \(mmproj\)"),
        ({"general.type": "adapter"}, "a LoRA adapter, not a model; merge it"),
        ({"adapter.type": "lora"}, "a LoRA adapter, not a model; merge it"),
        ({"general.type": "imatrix"}, "an importance matrix, not a model"),
    ],
)
def test_types(tmp_path: Path, tiny_opt: Path, keys: dict[str, str], message: str) -> None:
    texts = {key: (value, TEXT) for key, value in keys.items()}
    refused(changed(tiny_opt, tmp_path / "x.gguf", texts, {}), message)


def test_names_of_another_engine(tmp_path: Path, tiny_opt: Path) -> None:
    file = changed(tiny_opt, tmp_path / "x.gguf", {}, {}, architecture="gptoss")
    refused(file, "a file of Ollama's own engine, .* take llama.cpp's file")


def test_encoders(tmp_path: Path, tiny_opt: Path) -> None:
    file = changed(tiny_opt, tmp_path / "x.gguf", {}, {}, architecture="clip")
    refused(file, r"an encoder of images or sound \(mmproj\)")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("v.blk.0.attn_q.weight", "an encoder of images or sound inside"),
        ("mm.0.weight", "an encoder of images or sound inside"),
        ("blk.0.ffn_gate.0.weight", "the experts are stored one by one"),
    ],
)
def test_tensors(tmp_path: Path, tiny_opt: Path, tensor: str, message: str) -> None:
    values: NDArray[np.float32] = np.zeros((8, 8), np.float32)
    refused(changed(tiny_opt, tmp_path / "x.gguf", {}, {tensor: values}), message)


def test_vocabulary_only(tmp_path: Path, tiny_opt: Path) -> None:
    names = [tensor.name for tensor in GGUFReader(tiny_opt).tensors]
    file = changed(tiny_opt, tmp_path / "x.gguf", {}, {}, without=names)
    refused(file, "a vocabulary only, without weights")


def test_pointers(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", encoding="utf-8")
    refused(file, "a Git LFS pointer, without the data")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"# xet version 0\nfilesize = 1\n", "a pointer of the Hub, without the data"),
        (b"<!DOCTYPE html><html>", "a page of the web, not the model; download the file itself"),
        (b'{"error": "Repository not found"}', "JSON, such as the answer of a server"),
        (b"FROM llama3\n", "a Modelfile; take the model that it names"),
        (b"MZqFpD='\n", "a llamafile, a program with the model inside"),
        (b"PK\3\4" + bytes(40), "a zip archive, such as PyTorch's weights"),
        (b"\x80\2}q\0.", "weights of a checkpoint; convert its directory"),
        (bytes([20]) + bytes(7) + b'{"a": {}}' + bytes(40), "weights of a checkpoint"),
        (gzip.compress(b"GGUF", mtime=0), "packed or compressed; unpack it"),
        (bz2.compress(b"GGUF"), "packed or compressed; unpack it"),
        (lzma.compress(b"GGUF"), "packed or compressed; unpack it"),
        (b"\x28\xb5\x2f\xfd" + bytes(40), "packed or compressed; unpack it"),
        (b"tjgg\3\0\0\0" + bytes(40), "in the format before GGUF, of 2023; take a GGUF file"),
        (b"GGUF\1\0\0\0" + bytes(40), "version 1, expected 2 or 3; take a newer file"),
    ],
)
def test_other_formats(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    refused(file, message)


def test_joined_parts(tmp_path: Path, tiny_opt: Path) -> None:
    keys = {"split.count": (2, GGUFValueType.UINT16), "split.no": (0, GGUFValueType.UINT16)}
    file = changed(tiny_opt, tmp_path / "x-00001-of-00002.gguf", keys, {})
    file.write_bytes(file.read_bytes() + tiny_opt.read_bytes())
    refused(file, "joined byte by byte; take the files as they were")


def test_cut_files(tmp_path: Path, tiny_opt: Path) -> None:
    data = tiny_opt.read_bytes()
    for i, part in enumerate((data[:5000], data[5000:])):
        file = tmp_path / f"x.gguf.part{i + 1}of2"
        file.write_bytes(part)
        refused(file, "a piece of a file that was cut; join all pieces in order")
