"""Conversion to GGUF: the files, read with gguf-py, match the checkpoint."""

import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize, quantize

from h2o_cpp import Generator
from h2o_cpp.cli import main
from h2o_cpp.convert import convert
from h2o_cpp.convert.checkpoint import open_tensors
from h2o_cpp.convert.tensors import PlannedTensor
from support.needs import packages
from support.opt_checkpoint import (
    CONFIG,
    MERGES,
    TOKENS,
    Array,
    expected_tensors,
    make_checkpoint,
    random_weights,
    read_metadata,
    read_tensors,
    write_json,
    write_safetensors,
    write_shards,
    write_tokenizer_json,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize(
    ("outtype", "file_type"),
    [
        ("f32", LlamaFileType.ALL_F32),
        ("f16", LlamaFileType.MOSTLY_F16),
        ("bf16", LlamaFileType.MOSTLY_BF16),
        ("q8_0", LlamaFileType.MOSTLY_Q8_0),
    ],
)
def test_tensor_names_types_and_values(
    tmp_path: Path, outtype: str, file_type: LlamaFileType
) -> None:
    weights = make_checkpoint(tmp_path)
    convert(tmp_path, tmp_path / "out.gguf", outtype)
    tensors, expected = read_tensors(tmp_path / "out.gguf"), expected_tensors(weights)
    assert tensors.keys() == expected.keys()
    for name, (dtype, values) in tensors.items():
        small = expected[name].ndim == 1 or name == "position_embd.weight"
        assert dtype is (
            GGMLQuantizationType.F32 if small else GGMLQuantizationType[outtype.upper()]
        )
        np.testing.assert_array_equal(values, dequantize(quantize(expected[name], dtype), dtype))
    metadata = read_metadata(tmp_path / "out.gguf")
    assert metadata["general.file_type"] == file_type
    assert metadata.get("general.quantization_version") == (2 if outtype == "q8_0" else None)


def test_metadata(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "out.gguf")
    assert read_metadata(tmp_path / "out.gguf") == {
        "general.architecture": "opt",
        "general.type": "model",
        "general.name": "tiny",
        "general.file_type": 1,
        "opt.context_length": 10,
        "opt.embedding_length": 64,
        "opt.block_count": 2,
        "opt.feed_forward_length": 96,
        "opt.attention.head_count": 4,
        "opt.attention.head_count_kv": 4,
        "opt.attention.layer_norm_epsilon": pytest.approx(1e-5),
        "opt.vocab_size": 12,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*TOKENS, "[PAD9]", "[PAD10]", "[PAD11]"],
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 1, 1, 1, 1, 1, 5, 5, 5],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }


def test_unused_position_rows_are_dropped(tmp_path: Path) -> None:
    positions = make_checkpoint(tmp_path)["model.decoder.embed_positions.weight"]
    convert(tmp_path, tmp_path / "out.gguf")
    _, values = read_tensors(tmp_path / "out.gguf")["position_embd.weight"]
    assert positions.shape == (12, 64)
    np.testing.assert_array_equal(values, positions[2:])


@pytest.mark.parametrize(("tied", "sign"), [(True, 1), (True, -1), (False, 1), (False, -1)])
def test_head_is_written_if_untied_or_not_the_embedding(
    tmp_path: Path, tied: bool, sign: int
) -> None:
    """transformers 5 reads it so: a head of its own is not tied, whatever config.json says."""
    weights = make_checkpoint(tmp_path, tie_word_embeddings=tied)
    weights["lm_head.weight"] = sign * weights["model.decoder.embed_tokens.weight"]
    write_safetensors(tmp_path / "model.safetensors", weights)
    convert(tmp_path, tmp_path / "out.gguf", "f32")
    tensors = read_tensors(tmp_path / "out.gguf")
    assert ("output.weight" in tensors) is (not tied or sign < 0)
    if "output.weight" in tensors:
        np.testing.assert_array_equal(tensors["output.weight"][1], weights["lm_head.weight"])


def test_rows_of_partial_blocks_fall_back_to_f16(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, hidden_size=40, word_embed_proj_dim=40)
    convert(tmp_path, tmp_path / "out.gguf", "q8_0")
    tensors = read_tensors(tmp_path / "out.gguf")
    assert tensors["blk.0.attn_q.weight"][0] is GGMLQuantizationType.F16  # rows of 40
    assert tensors["blk.0.ffn_down.weight"][0] is GGMLQuantizationType.Q8_0  # rows of 96
    assert tensors["blk.0.ffn_down.bias"][0] is GGMLQuantizationType.F32


@pytest.mark.parametrize("dtype", ["F64", "F16", "BF16"])
def test_source_dtypes(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    convert(checkpoint, tmp_path / "f32.gguf", "f32")
    write_safetensors(checkpoint / "model.safetensors", random_weights(CONFIG), dtype)
    convert(checkpoint, tmp_path / "other.gguf", "f32")
    assert (tmp_path / "other.gguf").read_bytes() == (tmp_path / "f32.gguf").read_bytes()


def test_base_model_with_fairseq_version_tensor(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "causal.gguf")
    weights = {key.removeprefix("model."): v for key, v in random_weights(CONFIG).items()}
    weights["decoder.version"] = np.zeros(1, np.float32)
    write_safetensors(checkpoint / "model.safetensors", weights)
    convert(checkpoint, tmp_path / "base.gguf")
    assert (tmp_path / "base.gguf").read_bytes() == (tmp_path / "causal.gguf").read_bytes()


def test_shards(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "whole.gguf")
    write_shards(checkpoint, ["a.safetensors", "b.safetensors"])
    convert(checkpoint, tmp_path / "sharded.gguf")
    assert (tmp_path / "sharded.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


@pytest.mark.parametrize("layout", ["zip", "legacy", "bf16", "sharded"])
@packages("torch")
def test_pytorch_files(checkpoint: Path, tmp_path: Path, layout: str) -> None:
    import torch

    convert(checkpoint, tmp_path / "safetensors.gguf")
    (checkpoint / "model.safetensors").unlink()
    dtype = torch.bfloat16 if layout == "bf16" else torch.float32
    state = {key: torch.tensor(v, dtype=dtype) for key, v in random_weights(CONFIG).items()}
    name = "part.bin" if layout == "sharded" else "pytorch_model.bin"
    torch.save(state, checkpoint / name, _use_new_zipfile_serialization=layout != "legacy")
    if layout == "sharded":
        index = {"weight_map": dict.fromkeys(state, name)}
        write_json(checkpoint / "pytorch_model.bin.index.json", index)
    convert(checkpoint, tmp_path / "torch.gguf")
    assert (tmp_path / "torch.gguf").read_bytes() == (tmp_path / "safetensors.gguf").read_bytes()


@pytest.mark.parametrize("merges", [MERGES, [merge.split(" ") for merge in MERGES]])
def test_tokenizer_json_equals_vocab_and_merges(
    checkpoint: Path, tmp_path: Path, merges: list[object]
) -> None:
    convert(checkpoint, tmp_path / "vocab.gguf")
    (checkpoint / "vocab.json").unlink()
    (checkpoint / "merges.txt").unlink()
    write_tokenizer_json(checkpoint, {"model.merges": merges})
    convert(checkpoint, tmp_path / "json.gguf")
    assert (tmp_path / "json.gguf").read_bytes() == (tmp_path / "vocab.gguf").read_bytes()


def test_added_and_special_tokens(checkpoint: Path, tmp_path: Path) -> None:
    write_json(checkpoint / "added_tokens.json", {"<user>": 9})
    settings = {
        "bos_token": {"content": "<s>"},
        "add_bos_token": False,
        "additional_special_tokens": ["b"],
        "added_tokens_decoder": {"10": {"content": "<mask>", "special": True}},
        "chat_template": "{{ messages }}",
    }
    write_json(checkpoint / "tokenizer_config.json", settings)
    convert(checkpoint, tmp_path / "out.gguf")
    metadata = read_metadata(tmp_path / "out.gguf")
    assert metadata["tokenizer.ggml.tokens"] == [*TOKENS, "<user>", "<mask>", "[PAD11]"]
    assert metadata["tokenizer.ggml.token_type"] == [3, 3, 3, 3, 1, 3, 1, 1, 1, 4, 3, 5]
    assert (
        metadata["tokenizer.ggml.bos_token_id"] == 0
    )  # takes precedence over special_tokens_map.json
    assert metadata["tokenizer.ggml.eos_token_id"] == 2
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["tokenizer.chat_template"] == "{{ messages }}"


def test_special_ids_fall_back_to_config_json(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "special_tokens_map.json").unlink()
    write_json(checkpoint / "config.json", CONFIG | {"eos_token_id": 0})
    convert(checkpoint, tmp_path / "out.gguf")
    metadata = read_metadata(tmp_path / "out.gguf")
    assert metadata["tokenizer.ggml.bos_token_id"] == 2
    assert metadata["tokenizer.ggml.eos_token_id"] == 0
    assert "tokenizer.ggml.unknown_token_id" not in metadata


def test_all_end_tokens_end_an_output(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(checkpoint / "added_tokens.json", {"<|end|>": 9, "<|assistant|>": 10, "<|x|>": 11})
    write_json(checkpoint / "generation_config.json", {"eos_token_id": [2, 9, 10, 11]})
    assert main(["convert", str(checkpoint), "-o", str(tmp_path / "out.gguf")]) == 0
    assert capsys.readouterr().err.endswith(
        "note: <|x|> will not end an output: a GGUF file names at most three tokens that do\n"
    )
    with Generator(tmp_path / "out.gguf") as generator:
        assert generator.tokenizer.end_tokens == {2, 9, 10}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("old", [b"old file", None])
def test_interrupted_conversion_leaves_output_unchanged(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    old: bytes | None,
) -> None:
    listings: list[list[Path]] = []

    def fail_at_third_tensor(tensor: PlannedTensor) -> Array:
        listings.append(list(output.parent.iterdir()))
        if len(listings) == 3:
            raise error
        return encode(tensor)

    encode = PlannedTensor.encode
    monkeypatch.setattr(PlannedTensor, "encode", fail_at_third_tensor)
    output = tmp_path / "out" / "model.gguf"
    output.parent.mkdir()
    if old is not None:
        output.write_bytes(old)
    before = list(output.parent.iterdir())
    with pytest.raises(error):
        convert(checkpoint, output)
    assert len(listings[-1]) == len(before) + 1  # the temporary file, in the same directory
    assert list(output.parent.iterdir()) == before
    assert old is None or output.read_bytes() == old


def test_existing_file_is_replaced(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out.gguf").write_bytes(b"old file")
    convert(checkpoint, tmp_path / "out.gguf")
    assert read_metadata(tmp_path / "out.gguf")["general.architecture"] == "opt"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "tiny"]


def test_command_line(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(checkpoint), "--outtype", "q8_0"]) == 0
    assert read_metadata(tmp_path / "tiny-Q8_0.gguf")["general.file_type"] == 7
    assert main(["convert", str(checkpoint), "-o", "named.gguf"]) == 0
    assert read_metadata(tmp_path / "named.gguf")["general.file_type"] == 1
    sizes = [(tmp_path / name).stat().st_size / 2**20 for name in ("tiny-Q8_0.gguf", "named.gguf")]
    assert capsys.readouterr().err == (  # no progress bar: not a terminal
        f"wrote tiny-Q8_0.gguf ({sizes[0]:.2f} MiB)\nwrote named.gguf ({sizes[1]:.2f} MiB)\n"
    )

    named = ["convert", str(checkpoint), "-o", "named.gguf"]
    assert main(named) == 1
    assert capsys.readouterr().err == (
        "error: named.gguf: the file already exists (--force replaces it)\n"
    )
    assert (
        main(["convert", str(checkpoint), "-o", "named.gguf", "--outtype", "f32", "--force"]) == 0
    )
    assert read_metadata(tmp_path / "named.gguf")["general.file_type"] == 0
    capsys.readouterr()

    assert main(["convert", "nowhere"]) == 1
    assert capsys.readouterr().err == "error: nowhere: no such directory\n"
    with pytest.raises(SystemExit, match="2"):
        main(["convert", str(checkpoint), "--outtype", "q4_k"])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PlannedTensor, "encode", interrupt)
    assert main(["convert", str(checkpoint), "-o", "never.gguf"]) == 130
    assert not (tmp_path / "never.gguf").exists()


def test_tools_convert(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Path(__file__).parents[2] / "tools" / "convert"
    assert os.access(tool, os.X_OK)
    monkeypatch.setattr(sys, "argv", ["convert", str(checkpoint), "-o", str(tmp_path / "o.gguf")])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(tool), run_name="__main__")
    assert read_metadata(tmp_path / "o.gguf")["general.name"] == "tiny"


def test_trained_checkpoint(shared: Path, tmp_path: Path) -> None:
    source = shared / "models" / "tiny-opt-hf"
    convert(source, tmp_path / "out.gguf")
    weights = {name: tensor.read() for name, tensor in open_tensors(source).items() if tensor.read}
    tensors = read_tensors(tmp_path / "out.gguf")
    assert len(tensors) == len(weights) == 100
    for name, values in expected_tensors(weights, layers=6).items():
        np.testing.assert_array_equal(tensors[name][1], values)  # f16 in both
