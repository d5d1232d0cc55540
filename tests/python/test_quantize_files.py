"""Quantized files: tensor types, metadata, interrupts, errors."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize
from gguf.quants import quantize as gguf_quantize

from h2o_cpp import _core
from h2o_cpp.quantize import MIXES, quantize
from h2o_cpp.quantize.mix import Model
from support.llama_gguf import (
    Array,
    Shapes,
    decoded,
    llama_metadata,
    random_tensors,
    types,
    write_gguf,
    write_llama,
)
from support.opt_checkpoint import read_metadata, read_tensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_llama(tmp_path / "in.gguf")
    return tmp_path / "in.gguf"


@pytest.mark.parametrize("mix", MIXES)
def test_tensors_have_expected_types_and_values(source: Path, tmp_path: Path, mix: str) -> None:
    quantize(source, tmp_path / "out.gguf", mix)
    original = read_tensors(source)
    found = read_tensors(tmp_path / "out.gguf")
    assert list(found) == list(original)
    for name, (dtype, values) in found.items():
        expected = original[name][1]
        if expected.ndim == 1:
            assert dtype is GGMLQuantizationType.F32
            np.testing.assert_array_equal(values, expected)
        else:
            np.testing.assert_array_equal(values, decoded(dtype.name, expected))
    metadata = read_metadata(tmp_path / "out.gguf")
    assert metadata["general.file_type"] == LlamaFileType[f"MOSTLY_{mix}"]
    assert metadata["general.quantization_version"] == 2


# These of 17 layers get more bits: the first 17 // 8 = 2, those from 7 * 17 // 8 = 14 on, and every
# third in between.
MORE_BITS = {0, 1, 4, 7, 10, 13, 14, 15, 16}


@pytest.mark.parametrize(
    ("mix", "base", "values", "downs", "in_values", "in_downs"),
    [
        ("Q4_K_M", "Q4_K", "Q6_K", "Q6_K", MORE_BITS, MORE_BITS),
        ("Q5_K_M", "Q5_K", "Q6_K", "Q6_K", MORE_BITS, MORE_BITS),
        ("Q4_K_S", "Q4_K", "Q5_K", "Q5_K", {0, 1, 2, 3}, {0, 1}),
        ("Q6_K", "Q6_K", "", "", set(), set()),
        ("Q4_0", "Q4_0", "", "", set(), set()),
        ("Q8_0", "Q8_0", "", "", set(), set()),
    ],
)
def test_mix_types_by_tensor_and_layer(
    tmp_path: Path,
    mix: str,
    base: str,
    values: str,
    downs: str,
    in_values: set[int],
    in_downs: set[int],
) -> None:
    write_llama(tmp_path / "in.gguf", 17)
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", mix)
    found = types(tmp_path / "out.gguf")
    for name, dtype in found.items():
        layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
        if "norm" in name:
            expected = "F32"
        elif name == "output.weight":
            expected = "Q8_0" if mix == "Q8_0" else "Q6_K"
        elif "attn_v" in name and layer in in_values:
            expected = values
        elif "ffn_down" in name and layer in in_downs:
            expected = downs
        else:
            expected = base
        assert dtype == expected, name


def test_hybrids_count_fused_and_single_values_together(tmp_path: Path) -> None:
    """llama.cpp does so: attn_qkv of linear attention and attn_v are one series; the convolution's
    weights are not quantized."""
    row = (16, 256)
    linear: Shapes = {
        f"{name}.weight": row for name in ("attn_qkv", "attn_gate", "ssm_out", "ssm_beta")
    }
    linear |= {"ssm_conv1d.weight": (256, 4), "ssm_a": (16,), "ssm_dt.bias": (16,)}
    attention: Shapes = {f"{name}.weight": row for name in ("attn_q", "attn_v", "attn_output")}
    shapes = {
        f"blk.{i}.{name}": shape
        for i in range(17)
        for name, shape in (attention if i % 4 == 3 else linear).items()
    }
    write_gguf(tmp_path / "in.gguf", random_tensors(shapes), llama_metadata(17), "qwen35")
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_K_M")
    kept = {"ssm_conv1d.weight", "ssm_a", "ssm_dt.bias"}
    for name, dtype in types(tmp_path / "out.gguf").items():
        _, layer, part = name.split(".", 2)
        more = part in ("attn_qkv.weight", "attn_v.weight") and int(layer) in MORE_BITS
        assert dtype == ("F32" if part in kept else "Q6_K" if more else "Q4_K"), name


def test_weights_of_short_convolutions_are_not_quantized(tmp_path: Path) -> None:
    shapes: Shapes = {f"blk.0.shortconv.{part}.weight": (16, 256) for part in ("conv", "out_proj")}
    write_gguf(tmp_path / "in.gguf", random_tensors(shapes), llama_metadata(1), "lfm2")
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_K_S")
    found = types(tmp_path / "out.gguf")
    assert found == {
        "blk.0.shortconv.conv.weight": "F32",
        "blk.0.shortconv.out_proj.weight": "Q4_K",
    }


@pytest.mark.parametrize(("heads", "is_70b"), [({"head_count_kv": 8}, True), ({}, False)])
def test_70b_has_fewer_kv_heads(heads: dict[str, int], is_70b: bool) -> None:
    """Llama 65B also has 80 layers; its files may lack the number of KV heads."""
    metadata = {"general.architecture": "llama", "llama.block_count": 80}
    metadata |= {f"llama.attention.{k}": n for k, n in ({"head_count": 64} | heads).items()}
    assert Model.of(metadata).is_70b == is_70b


def test_tied_embedding_has_the_type_of_the_output(tmp_path: Path) -> None:
    write_llama(tmp_path / "in.gguf", tied=True)
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_K_M")
    assert types(tmp_path / "out.gguf")["token_embd.weight"] == "Q6_K"


@pytest.mark.parametrize(
    ("mix", "at_32", "at_8", "output"),
    [
        ("Q4_K_M", "Q5_0", "F16", "Q8_0"),
        ("Q5_K_M", "Q5_1", "F16", "Q8_0"),
        ("Q6_K", "Q8_0", "F16", "Q8_0"),
        ("Q4_0", "Q4_0", "F16", "Q8_0"),
    ],
)
def test_fallback_types_of_rows_that_are_not_whole_blocks(
    tmp_path: Path, mix: str, at_32: str, at_8: str, output: str
) -> None:
    write_llama(tmp_path / "in.gguf", n_embd=96, n_ff=40)
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", mix)
    found = types(tmp_path / "out.gguf")
    assert found["blk.0.attn_q.weight"] == at_32  # rows of 96
    assert found["blk.0.ffn_down.weight"] == at_8  # rows of 40
    assert found["output.weight"] == output
    original, halves = read_tensors(tmp_path / "in.gguf"), read_tensors(tmp_path / "out.gguf")
    name = "blk.0.ffn_down.weight"
    np.testing.assert_array_equal(halves[name][1], original[name][1].astype(np.float16))


def test_tensors_that_are_not_matmul_weights_are_not_quantized(tmp_path: Path) -> None:
    names = [
        "position_embd.weight",
        "token_types.weight",
        "blk.0.attn_q_norm.weight",
        "blk.0.ffn_gate_inp.weight",
        "blk.0.attn_q.bias",
        "rope_freqs.table",
    ]
    tensors: dict[str, Array] = {name: np.ones((4, 256), np.float32) for name in names}
    tensors["blk.0.one_row.weight"] = np.ones((1, 256), np.float32)
    tensors["counts.weight"] = np.ones(256, np.int32)
    tensors["blk.0.attn_q.weight"] = np.ones((4, 256), np.float32)
    write_gguf(tmp_path / "in.gguf", tensors, {})
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_0")
    found = types(tmp_path / "out.gguf")
    assert found.pop("blk.0.attn_q.weight") == "Q4_0"
    assert found.pop("counts.weight") == "I32"
    assert set(found.values()) == {"F32"}


@pytest.mark.parametrize("dtype", ["F16", "BF16", "Q8_0"])
def test_source_types(tmp_path: Path, dtype: str) -> None:
    type = GGMLQuantizationType[dtype]
    values = np.random.default_rng(7).standard_normal((64, 256)).astype(np.float32)
    stored = gguf_quantize(values, type)
    with closing(GGUFWriter(tmp_path / "in.gguf", "llama")) as writer:
        writer.add_tensor("blk.0.ffn_up.weight", stored, raw_dtype=type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    for mix in ("Q4_K_S", "Q8_0"):
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", mix)
        [(_, found)] = read_tensors(tmp_path / "out.gguf").values()
        expected = dequantize(stored, type)
        if mix != dtype:
            expected = decoded(MIXES[mix].type.name, expected)
        np.testing.assert_array_equal(found, expected)


def test_experts(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "in.gguf", n_experts=3)
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_K_M")
    name = "blk.1.ffn_down_exps.weight"
    dtype, values = read_tensors(tmp_path / "out.gguf")[name]
    assert values.shape == (3, 16, 512)
    np.testing.assert_array_equal(
        values.reshape(-1, 512), decoded(dtype.name, tensors[name].reshape(-1, 512))
    )


def test_tensors_quantized_in_pieces_are_identical(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(source, tmp_path / "whole.gguf", "Q4_K_M")
    monkeypatch.setattr("h2o_cpp.quantize.quantization._PIECE", 1000)
    quantize(source, tmp_path / "pieces.gguf", "Q4_K_M", threads=1)
    assert (tmp_path / "pieces.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


VALUES: dict[str, tuple[Any, GGUFValueType]] = {
    "u8": (255, GGUFValueType.UINT8),
    "i8": (-128, GGUFValueType.INT8),
    "u16": (65535, GGUFValueType.UINT16),
    "i16": (-32768, GGUFValueType.INT16),
    "u32": (2**32 - 1, GGUFValueType.UINT32),
    "i32": (-(2**31), GGUFValueType.INT32),
    "f32": (0.1, GGUFValueType.FLOAT32),
    "bool": (True, GGUFValueType.BOOL),
    "string": ("naïve 🙂\0", GGUFValueType.STRING),
    "empty": ("", GGUFValueType.STRING),
    "u64": (2**64 - 1, GGUFValueType.UINT64),
    "i64": (-(2**63), GGUFValueType.INT64),
    "f64": (0.1, GGUFValueType.FLOAT64),
    "strings": (["a", "", "ü"], GGUFValueType.ARRAY),
    "numbers": ([1.5, -2.5], GGUFValueType.ARRAY),
    "flags": ([True, False], GGUFValueType.ARRAY),
}


def fields(path: Path) -> list[tuple[str, list[GGUFValueType], bytes]]:
    return [
        (key, field.types, b"".join(part.tobytes() for part in field.parts))
        for key, field in GGUFReader(path).fields.items()
        if not key.startswith("GGUF.")
    ]


@pytest.mark.parametrize("alignment", [None, 64])
def test_metadata_is_copied_byte_for_byte(tmp_path: Path, alignment: int | None) -> None:
    with closing(GGUFWriter(tmp_path / "in.gguf", "llama")) as writer:
        if alignment is not None:
            writer.add_custom_alignment(alignment)
        writer.add_file_type(LlamaFileType.ALL_F32)
        for key, (value, type) in VALUES.items():
            writer.add_key_value(f"test.{key}", value, type)
        for name in ("a.weight", "b.weight"):
            writer.add_tensor(name, np.ones((3, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_1")
    before, after = fields(tmp_path / "in.gguf"), fields(tmp_path / "out.gguf")
    assert after[-1][0] == "general.quantization_version"  # not in the input
    del after[-1]
    assert [key for key, _, _ in after] == [key for key, _, _ in before]
    assert [key for key, old in enumerate(before) if old != after[key]] == [
        [key for key, _, _ in before].index("general.file_type")
    ]
    tensors = GGUFReader(tmp_path / "out.gguf").tensors
    assert all(tensor.data_offset % (alignment or 32) == 0 for tensor in tensors)
    assert [tensor.name for tensor in tensors] == ["a.weight", "b.weight"]
    assert (tmp_path / "out.gguf").stat().st_size % (alignment or 32) == 0


def test_split_model_becomes_one_file(tmp_path: Path) -> None:
    tensors = random_tensors({f"blk.{i}.ffn_up.weight": (4, 256) for i in range(3)})
    for file, max_tensors in (("whole", 0), ("split", 1)):  # 0: not split
        with closing(
            GGUFWriter(tmp_path / f"{file}.gguf", "llama", split_max_tensors=max_tensors)
        ) as writer:
            writer.add_name("whole")
            for name, values in tensors.items():
                writer.add_tensor(name, values)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
    quantize(tmp_path / "whole.gguf", tmp_path / "a.gguf", "Q8_0")
    quantize(tmp_path / "split-00001-of-00003.gguf", tmp_path / "b.gguf", "Q8_0")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    with pytest.raises(ValueError, match="open the first"):
        quantize(tmp_path / "split-00002-of-00003.gguf", tmp_path / "c.gguf", "Q8_0")
    with pytest.raises(ValueError, match="the output is the input"):
        quantize(
            tmp_path / "split-00001-of-00003.gguf", tmp_path / "split-00003-of-00003.gguf", "Q8_0"
        )


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("old", [b"old file", None])
def test_interrupt_leaves_the_output_unchanged(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interrupt: type[BaseException],
    old: bytes | None,
) -> None:
    output = tmp_path / "out" / "out.gguf"
    output.parent.mkdir()
    if old is not None:
        output.write_bytes(old)
    before = list(output.parent.iterdir())
    listings: list[list[Path]] = []

    def fail_at_the_third(*args: Any, **options: Any) -> Array:
        listings.append(list(output.parent.iterdir()))
        if len(listings) == 3:
            raise interrupt
        return original(*args, **options)

    original = _core.quantize
    monkeypatch.setattr(_core, "quantize", fail_at_the_third)
    with pytest.raises(interrupt):
        quantize(source, output, "Q4_0")
    assert len(listings[-1]) == len(before) + 1  # the temporary file existed
    assert list(output.parent.iterdir()) == before
    assert old is None or output.read_bytes() == old


def test_error_names_the_invalid_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h2o_cpp.quantize.quantization._PIECE", 1024)
    values = np.ones((16, 256), np.float32)
    values[9, 3] = np.nan
    write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": values}, {})
    with pytest.raises(
        ValueError, match=r"tensor blk\.0\.ffn_up\.weight: from row 8: .* row 1, column 3 is nan"
    ):
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_0")
    assert not (tmp_path / "out.gguf").exists()


def test_f16_overflow_is_rejected(tmp_path: Path) -> None:
    values = np.full((2, 40), 1e6, np.float32)
    write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": values}, {})
    with pytest.raises(ValueError, match=r"ffn_up\.weight: .*beyond the range of F16"):
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_0")


# One mix for each type.
@pytest.mark.parametrize("mix", {mix.type: name for name, mix in MIXES.items()}.values())
def test_every_type_generates(whole_blocks: Path, tmp_path: Path, mix: str) -> None:
    from h2o_cpp import Generator

    quantize(whole_blocks, tmp_path / "out.gguf", mix)
    assert MIXES[mix].type.name in types(tmp_path / "out.gguf").values()
    with Generator(tmp_path / "out.gguf", threads=2) as generator:
        logits = generator.logits(generator.tokenize("The old man"))
        assert np.isfinite(logits).all()
        assert logits.std() > 0
        stream = generator.stream("The old man", max_tokens=8, temperature=0.0, ignore_eos=True)
        assert "".join(stream)
        assert len(stream.tokens) == 8
