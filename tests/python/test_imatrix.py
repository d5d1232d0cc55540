"""Importance matrices: llama.cpp's two file formats, their effect, and invalid files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from numpy.typing import NDArray

from h2o_cpp import BUNDLED_MODEL, _core
from h2o_cpp.quantize import make_imatrix, quantize
from h2o_cpp.quantize.imatrix import read_imatrix
from support.opt_checkpoint import read_tensors

Floats = NDArray[np.float32]


def write_dat(path: Path, sums: dict[str, Floats], calls: int) -> None:
    """Write llama.cpp's format until 2025; its last fields, about the texts, are optional."""
    data = struct.pack("<i", len(sums))
    for name, values in sums.items():
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack("<ii", calls, values.size) + values.astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<ii", 1, 4) + b"text")


def write_gguf(path: Path, sums: dict[str, Floats], counts: dict[str, Floats]) -> None:
    """Write llama.cpp's current format."""
    writer = GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    for name, values in sums.items():
        writer.add_tensor(f"{name}.in_sum2", values)
        writer.add_tensor(f"{name}.counts", counts[name].reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_both_formats_give_the_same_matrix(tmp_path: Path) -> None:
    sums = {"blk.0.attn_q.weight": np.arange(8, dtype=np.float32)}
    write_dat(tmp_path / "a.dat", sums, 4)
    write_gguf(
        tmp_path / "a.gguf",
        {name: values.reshape(1, -1) for name, values in sums.items()},
        {"blk.0.attn_q.weight": np.array([4], np.float32)},
    )
    for file in ("a.dat", "a.gguf"):
        [(name, values)] = read_imatrix(tmp_path / file).items()
        assert name == "blk.0.attn_q.weight"
        np.testing.assert_array_equal(values.ravel(), np.arange(8) / 4)


def test_experts_have_separate_counts(tmp_path: Path) -> None:
    name = "blk.0.ffn_up_exps.weight"
    sums = np.arange(12, dtype=np.float32).reshape(3, 4)
    counts = np.array([2, 0, 4], np.float32)
    write_gguf(tmp_path / "a.gguf", {name: sums}, {name: counts})
    values = read_imatrix(tmp_path / "a.gguf")[name]
    np.testing.assert_array_equal(values, [sums[0] / 2, np.ones(4), sums[2] / 4])


@pytest.mark.parametrize("data", [b"", b"\1\0\0\0", struct.pack("<i", -1), struct.pack("<i", 0),
                                  struct.pack("<iii", 1, 2**30, 3), b"x" * 100])  # fmt: skip
def test_other_files_are_rejected(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.dat").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.dat: not an importance matrix \((it|a)"):
        read_imatrix(tmp_path / "a.dat")


def test_context_0_is_the_trained_length(tmp_path: Path) -> None:
    written = []
    for n_ctx in (0, 2048):
        written.append(tmp_path / f"{n_ctx}.gguf")
        assert make_imatrix(BUNDLED_MODEL, "The old man. ", written[-1], n_ctx=n_ctx) > 0
    assert written[0].read_bytes() == written[1].read_bytes()


def test_model_file_is_rejected(data: Path) -> None:
    with pytest.raises(ValueError, match=r"general\.type is 'model', expected 'imatrix'"):
        read_imatrix(data / "golden" / "qwen3.gguf")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A mixture of experts whose rows are whole blocks."""
    random = np.random.default_rng(1)
    writer = GGUFWriter(tmp_path / "f32.gguf", "llama")
    writer.add_type("model")
    for name, shape in (
        ("blk.0.attn_q.weight", (8, 256)),
        ("blk.0.ffn_up_exps.weight", (3, 4, 256)),
    ):
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "f32.gguf"


def test_each_tensor_and_expert_uses_its_own_importance(tmp_path: Path, model: Path) -> None:
    random = np.random.default_rng(2)
    sums = {
        "blk.0.attn_q.weight": random.random((1, 256)).astype(np.float32) ** 4,
        "blk.0.ffn_up_exps.weight": random.random((3, 256)).astype(np.float32) ** 4,
    }
    counts = {name: np.ones(len(values), np.float32) for name, values in sums.items()}
    write_gguf(tmp_path / "imatrix.gguf", sums, counts)
    quantize(model, tmp_path / "out.gguf", "Q3_K_S", imatrix=tmp_path / "imatrix.gguf")
    file = _core.GgufFile(tmp_path / "out.gguf")
    weights = read_tensors(model)
    for index, (name, dtype, *_) in enumerate(file.tensors()):
        assert dtype == "Q3_K"
        matrices = weights[name][1].reshape(len(sums[name]), -1, 256)
        expected = [
            _core.quantize("Q3_K", matrix, threads=1, importance=importance).ravel()
            for matrix, importance in zip(matrices, sums[name], strict=True)
        ]
        written = np.asarray(file.tensor_data(index)).ravel()
        np.testing.assert_array_equal(written, np.concatenate(expected))


def test_matrix_of_another_model_is_rejected(tmp_path: Path, model: Path) -> None:
    other = {"blk.7.attn_q.weight": np.ones(256, np.float32)}
    write_dat(tmp_path / "a.dat", other, 1)
    with pytest.raises(ValueError, match="has none of the tensors"):
        quantize(model, tmp_path / "out.gguf", "Q4_K_M", imatrix=tmp_path / "a.dat")
    write_dat(tmp_path / "a.dat", {"blk.0.attn_q.weight": np.ones(255, np.float32)}, 1)
    with pytest.raises(ValueError, match="has 255 numbers, expected 256 for each of 1 matrices"):
        quantize(model, tmp_path / "out.gguf", "Q4_K_M", imatrix=tmp_path / "a.dat")
    assert not (tmp_path / "out.gguf").exists()
    with pytest.raises(FileNotFoundError):
        quantize(model, tmp_path / "out.gguf", "Q4_K_M", imatrix=tmp_path / "none.dat")
