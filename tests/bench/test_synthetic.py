"""Benchmark models with random weights: real shapes and metadata, and files that load."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from h2o_cpp import Generator, _core
from h2o_cpp.convert.conversion import FAMILIES
from h2o_cpp.quantize import quantize
from h2o_cpp.quantize.mix import MIXES
from support.llama_gguf import types
from support.needs import packages
from support.shapes import N_SPECIAL, SHAPES, small
from support.synthetic import RANDOM, write_model

# Parameter counts of the published checkpoints, without OPT's two unused position rows.
PARAMETERS = {
    "TinyLlama-1.1B": 1_100_048_384,
    "LLaMA-7B": 6_738_415_616,
    "LLaMA-3-8B": 8_030_261_248,
    "OPT-125M": 125_239_296 - 2 * 768,
    "OPT-1.3B": 1_315_758_080 - 2 * 2048,
    "OPT-6.7B": 6_658_473_984 - 2 * 4096,
    "OPT-30B": 29_974_540_288 - 2 * 7168,
    "SmolLM2-135M": 134_515_008,
    "Pythia-410M": 405_334_016,
    "GPT-NeoX-20B": 20_554_567_680,
    "gpt-oss-20b": 20_914_757_184,
}
TEXT = "The old man said: “naïve café” costs 5 €, \n\tor 1234567890 🦙!"


@pytest.mark.parametrize("shape", PARAMETERS)
def test_shapes_have_published_parameter_counts(shape: str) -> None:
    config = SHAPES[shape]
    tensors = FAMILIES[config["architectures"][0]].tensors(config)
    sizes = [spec.written_shape for spec in tensors]
    assert sum(map(prod, sizes)) == PARAMETERS[shape]


@pytest.mark.parametrize(
    ("shape", "type"),
    [*((shape, "Q4_K_M") for shape in SHAPES), *(("TinyLlama-1.1B", type) for type in RANDOM)],
)
def test_files_load_and_compute(shape: str, type: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    config = small(shape, num_hidden_layers=2)
    write_model(path, config, type)
    with Generator(path, n_ctx=64) as generator:
        assert generator.n_vocab == 1000
        logits = generator.logits(np.random.default_rng(0).integers(N_SPECIAL, 1000, 64))
    assert np.isfinite(logits).all()
    assert logits.std() > 0
    metadata = _core.GgufFile(path).metadata()
    architecture = metadata["general.architecture"]
    assert metadata[f"{architecture}.context_length"] == config["max_position_embeddings"]
    assert metadata[f"{architecture}.block_count"] == 2
    assert len(metadata["tokenizer.ggml.tokens"]) == 1000


@pytest.fixture(scope="module")
def f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("f32") / "model.gguf"
    write_model(path, small("SmolLM2-135M"), "F32")
    return path


def blocks_of_zeros(type_name: str, values: NDArray[np.float32], **_: Any) -> NDArray[np.uint8]:
    """Zeros of the size of the quantized values; the choice of types ignores the values."""
    size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return np.zeros((len(values), values.shape[1] // size * nbytes), np.uint8)


@pytest.mark.parametrize("type_name", ["F16", "BF16", *MIXES])
def test_types_equal_quantizer(
    type_name: str, f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "quantize", blocks_of_zeros)
    expected, found = tmp_path / "expected.gguf", tmp_path / "found.gguf"
    write_model(found, small("SmolLM2-135M"), type_name)
    if type_name in ("F16", "BF16"):
        assert set(types(found).values()) == {"F32", type_name}
        return
    quantize(f32, expected, type_name)
    assert types(found) == types(expected)
    assert found.stat().st_size == pytest.approx(expected.stat().st_size, abs=4096)  # names differ


def test_weights_are_random_with_expected_scale(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, small("TinyLlama-1.1B"), "F32")
    file = _core.GgufFile(path)
    tensors = {
        name: file.tensor_data(i).view(np.float32).reshape(shape)
        for i, (name, _, shape, _) in enumerate(file.tensors())
    }
    down = tensors["blk.0.ffn_down.weight"]
    # 131072 normal values: the standard deviation of their standard deviation is 1/512 of it.
    assert down.std() == pytest.approx(512**-0.5, rel=5 / 512)
    assert (tensors["blk.0.attn_norm.weight"] == 1).all()
    q, output = tensors["blk.0.attn_q.weight"], tensors["blk.0.attn_output.weight"]
    assert (q != output).any()
    assert (q != tensors["blk.1.attn_q.weight"]).any()


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, small("OPT-1.3B", vocab_size=50272), "F16")
    with Generator(path) as generator:
        tokens = generator.tokenize(TEXT)
        assert tokens[0] == 0  # OPT begins with <s>
        assert generator.detokenize(tokens[1:]) == TEXT
        assert len(tokens) < len(TEXT.encode())  # some tokens are byte pairs
        assert all(token < N_SPECIAL for token in generator.tokenize("")) or not tokens


@packages("llama_cpp")
def test_llama_cpp_tokenizes_identically(tmp_path: Path) -> None:
    import llama_cpp

    for shape in ("TinyLlama-1.1B", "Pythia-410M"):
        path = tmp_path / f"{shape}.gguf"
        write_model(path, small(shape), "Q8_0")
        theirs = llama_cpp.Llama(str(path), n_ctx=64, verbose=False)
        with Generator(path) as generator:
            tokens = generator.tokenize(TEXT, add_special=False)
            assert theirs.tokenize(TEXT.encode(), add_bos=False) == tokens
            assert theirs.n_vocab() == generator.n_vocab
        theirs.close()


def test_errors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match="Q9_9"):
        write_model(path, small("OPT-1.3B"), "Q9_9")
    for n_vocab in (259, 4 + 256 + 256**2 + 256**3 + 1):
        with pytest.raises(ValueError, match="vocab_size"):
            write_model(path, small("OPT-1.3B", vocab_size=n_vocab), "F16")
    assert not path.exists()
