"""Quantisation: blocks beside gguf-py's, which tensor gets which type, files, and refusals."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize
from gguf.quants import quantize as gguf_quantize

from h2o_cpp import _core
from h2o_cpp.cli import main
from h2o_cpp.quantize import MIXES, quantize
from llama_gguf import Array, llama_metadata, llama_shapes, random_tensors, write_gguf
from opt_checkpoint import read_metadata, read_tensors

SIMPLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def with_extremes(values: Array, low: float, high: float) -> Array:
    """So that the step of each block is known: the first weights are its extremes."""
    values[:, ::32] = low
    values[:, 1::32] = high
    return values


def ties(low: float, high: float) -> Callable[[], Array]:
    """Every value is a level or halfway between two, for a block from `low` to `high`."""
    return lambda: with_extremes(
        rng().integers(int(2 * low), int(2 * high) + 1, (64, 256)) / 2, low, high
    )


INPUTS: dict[str, Callable[[], Array]] = {
    "normal": lambda: rng().standard_normal((64, 256)),
    "heavy tails": lambda: rng().standard_t(2, (64, 256)),
    "constant": lambda: np.full((4, 256), 3.7),
    "negative constant": lambda: np.full((4, 256), -0.3),
    "zero": lambda: np.zeros((2, 256)),
    "negative zero": lambda: -np.zeros((2, 256)),
    "zeros of both signs": lambda: with_extremes(
        rng().choice([0.0, -0.0, 1.0], (64, 256), p=[0.5, 0.4, 0.1]), -2.0, 3.0
    ),
    "equal magnitudes": lambda: rng().choice([-1.0, 1.0], (64, 256)),
    "f16 subnormal": lambda: 1e-6 * rng().standard_normal((64, 256)),
    "below f16": lambda: 1e-30 * rng().standard_normal((64, 256)),
    "reciprocal overflows": lambda: 1e-40 * rng().standard_normal((64, 256)),
    "huge": lambda: rng().uniform(-60000, 60000, (64, 256)),
    "ties of Q4_0": ties(-8, 7),
    "ties of Q4_1": ties(0, 15),
    "ties of Q5_0": ties(-16, 15),
    "ties of Q5_1": ties(0, 31),
    "ties of Q8_0": ties(-127, 127),
}


@pytest.mark.parametrize("dtype", SIMPLE)
@pytest.mark.parametrize("kind", INPUTS)
def test_simple_types_are_gguf_pys_bit_for_bit(kind: str, dtype: str) -> None:
    values = INPUTS[kind]().astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = gguf_quantize(values, GGMLQuantizationType[dtype])
    np.testing.assert_array_equal(_core.quantize(dtype, values, threads=2), expected)


@pytest.mark.parametrize("dtype", ["Q4_1", "Q5_1"])
def test_a_minimum_of_both_zeros_has_either_sign(dtype: str) -> None:
    # Which zero is the minimum of +0 and -0 depends on numpy's vector instructions.
    values = rng().choice([0.0, -0.0, 1.0], (64, 256)).astype(np.float32)
    type = GGMLQuantizationType[dtype]
    np.testing.assert_array_equal(
        decoded(dtype, values), dequantize(gguf_quantize(values, type), type)
    )


@pytest.mark.parametrize("dtype", [*SIMPLE, *K_QUANTS])
def test_threads_do_not_matter(dtype: str) -> None:
    values = rng().standard_normal((301, 512)).astype(np.float32)
    one = _core.quantize(dtype, values, threads=1)
    for threads in (2, 3, 8):
        np.testing.assert_array_equal(_core.quantize(dtype, values, threads=threads), one)
    np.testing.assert_array_equal(_core.quantize(dtype, values[100:], threads=2), one[100:])


def error(values: Array, decoded: Array) -> float:
    return float(np.sqrt(np.mean((values.astype(np.float64) - decoded) ** 2)))


def decoded(dtype: str, values: Array) -> Array:
    blocks = _core.quantize(dtype, values, threads=2)
    values = dequantize(blocks, GGMLQuantizationType[dtype])
    return values


def rounded_to_nearest(dtype: str, values: Array) -> Array:
    """The plain way: scales and mins from the extremes, all rounded to nearest."""
    if dtype == "Q6_K":
        groups = values.reshape(-1, 16, 16)
        scales = np.abs(groups).max(-1, keepdims=True) / 31
        unit = scales.max(1, keepdims=True) / 127
        steps = unit * np.rint(scales / unit)
        levels = np.clip(np.rint(groups / steps), -32, 31)
        return np.reshape(steps * levels, values.shape)
    highest = 15 if dtype == "Q4_K" else 31
    groups = values.reshape(-1, 8, 32)
    lows = np.minimum(groups.min(-1, keepdims=True), 0)
    scales = (groups.max(-1, keepdims=True) - lows) / highest
    unit, min_unit = scales.max(1, keepdims=True) / 63, -lows.min(1, keepdims=True) / 63
    steps, mins = unit * np.rint(scales / unit), min_unit * np.rint(-lows / min_unit)
    levels = np.clip(np.rint((groups + mins) / steps), 0, highest)
    return np.reshape(steps * levels - mins, values.shape)


@pytest.mark.parametrize("dtype", K_QUANTS)
@pytest.mark.parametrize("kind", ["normal", "heavy tails"])
def test_k_quants_beat_rounding_to_nearest(kind: str, dtype: str) -> None:
    # Seen: 0.70 to 0.94 of its error.
    values = INPUTS[kind]().astype(np.float32)
    assert error(values, decoded(dtype, values)) < 0.96 * error(
        values, rounded_to_nearest(dtype, values)
    )


@pytest.mark.parametrize("dtype", K_QUANTS)
@pytest.mark.parametrize("kind", [*INPUTS, "positive", "one far out", "constant blocks"])
def test_k_quants_of_any_input_are_within_a_step(kind: str, dtype: str) -> None:
    more: dict[str, Callable[[], Array]] = {
        "positive": lambda: 1 + rng().random((64, 256)),
        "one far out": lambda: np.where(np.arange(256) == 77, 500, rng().standard_normal((8, 256))),
        "constant blocks": lambda: np.repeat(rng().standard_normal((64, 1)), 256, axis=1),
    }
    values = (INPUTS | more)[kind]().astype(np.float32)
    # Weights are clipped where that helps the others, but none by as much as a step of a block
    # whose levels span zero and all weights, and one of the smallest f16.
    highest = {"Q4_K": 15, "Q5_K": 31, "Q6_K": 31}[dtype]
    blocks = values.reshape(-1, 256)
    span = np.maximum(blocks.max(1), 0) - np.minimum(blocks.min(1), 0)
    if dtype == "Q6_K":
        span = np.abs(blocks).max(1)
    allowed = span / highest + 2.0**-24
    off = np.abs(decoded(dtype, values).reshape(-1, 256) - blocks).max(1)
    assert (off <= allowed).all()


@pytest.mark.parametrize("dtype", [*SIMPLE, *K_QUANTS])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(dtype: str, bad: float) -> None:
    values = np.zeros((300, 512), np.float32)
    values[250, 0] = values[201, 511] = bad
    with pytest.raises(ValueError, match=rf"row 201, column 511 is -?{str(bad).strip('-')}"):
        _core.quantize(dtype, values, threads=3)


@pytest.mark.parametrize("dtype", [*SIMPLE, *K_QUANTS])
def test_values_whose_scale_f16_cannot_hold_are_refused(dtype: str) -> None:
    values = np.ones((3, 512), np.float32)
    values[1, 300] = -3e38
    with pytest.raises(ValueError, match=rf"row 1, column 300 is -3e\+38, too large for {dtype}"):
        _core.quantize(dtype, values, threads=1)


def test_bad_arguments() -> None:
    values = np.zeros((2, 96), np.float32)
    with pytest.raises(ValueError, match=r"expected one of Q4_0, .*Q6_K"):
        _core.quantize("Q3_K", values, threads=1)
    with pytest.raises(ValueError, match="2 rows of 96, expected a multiple of 256 for Q4_K"):
        _core.quantize("Q4_K", values, threads=1)
    with pytest.raises(ValueError, match="0 threads"):
        _core.quantize("Q4_0", values, threads=0)
    with pytest.raises(ValueError, match="1 dimensions, expected 2"):
        _core.quantize("Q4_0", values[0], threads=1)
    assert _core.quantize("Q4_0", values[:0], threads=1).shape == (0, 54)


def write_llama(path: Path, n_layers: int = 2, **sizes: Any) -> dict[str, Array]:
    tensors = random_tensors(llama_shapes(n_layers, **sizes))
    sizes = {key: value for key, value in sizes.items() if key in ("n_embd", "n_ff")}
    write_gguf(path, tensors, llama_metadata(n_layers, **sizes))
    return tensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_llama(tmp_path / "in.gguf")
    return tmp_path / "in.gguf"


def types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}


@pytest.mark.parametrize("mix", MIXES)
def test_tensors_have_their_types_and_values(source: Path, tmp_path: Path, mix: str) -> None:
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


# The layers of 17 that get more bits: 17 // 8 = 2 at the start, from 7 * 17 // 8 = 14 at the end,
# and every third between.
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
def test_the_mix(
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


def test_a_tied_embedding_is_an_output(tmp_path: Path) -> None:
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
def test_rows_that_are_not_whole_blocks(
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


def test_what_is_not_multiplied_with_stays(tmp_path: Path) -> None:
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
def test_sources_of_other_types(tmp_path: Path, dtype: str) -> None:
    type = GGMLQuantizationType[dtype]
    values = rng().standard_normal((64, 256)).astype(np.float32)
    stored = gguf_quantize(values, type)
    with closing(GGUFWriter(tmp_path / "in.gguf", "llama")) as writer:
        writer.add_tensor("blk.0.ffn_up.weight", stored, raw_dtype=type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    for mix in ("Q4_K_S", "Q8_0"):
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", mix)
        [(_, found)] = read_tensors(tmp_path / "out.gguf").values()
        known = dequantize(stored, type)
        if mix != dtype:
            known = decoded(MIXES[mix].type.name, known)
        np.testing.assert_array_equal(found, known)


def test_experts(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "in.gguf", n_experts=3)
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_K_M")
    name = "blk.1.ffn_down_exps.weight"
    dtype, values = read_tensors(tmp_path / "out.gguf")[name]
    assert values.shape == (3, 16, 512)
    np.testing.assert_array_equal(
        values.reshape(-1, 512), decoded(dtype.name, tensors[name].reshape(-1, 512))
    )


def test_large_tensors_are_done_in_pieces(
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
    assert after[-1][0] == "general.quantization_version"  # it was not there before
    del after[-1]
    assert [key for key, _, _ in after] == [key for key, _, _ in before]
    assert [key for key, old in enumerate(before) if old != after[key]] == [
        [key for key, _, _ in before].index("general.file_type")
    ]
    tensors = GGUFReader(tmp_path / "out.gguf").tensors
    assert all(tensor.data_offset % (alignment or 32) == 0 for tensor in tensors)
    assert [tensor.name for tensor in tensors] == ["a.weight", "b.weight"]
    assert (tmp_path / "out.gguf").stat().st_size % (alignment or 32) == 0


def test_a_split_model_becomes_one_file(tmp_path: Path) -> None:
    tensors = random_tensors({f"blk.{i}.ffn_up.weight": (4, 256) for i in range(3)})
    with closing(GGUFWriter(tmp_path / "whole.gguf", "llama")) as writer:
        writer.add_name("whole")
        for name, values in tensors.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    with closing(GGUFWriter(tmp_path / "split.gguf", "llama", split_max_tensors=1)) as writer:
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
def test_an_interrupt_leaves_what_was_there(
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
    assert len(listings[-1]) == len(before) + 1  # the temporary file was there
    assert list(output.parent.iterdir()) == before
    assert old is None or output.read_bytes() == old


def test_a_bad_weight_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h2o_cpp.quantize.quantization._PIECE", 1024)
    values = np.ones((16, 256), np.float32)
    values[9, 3] = np.nan
    write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": values}, {})
    with pytest.raises(
        ValueError, match=r"tensor blk\.0\.ffn_up\.weight: from row 8: .* row 1, column 3 is nan"
    ):
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_0")
    assert not (tmp_path / "out.gguf").exists()


def test_f16_that_overflows_is_refused(tmp_path: Path) -> None:
    values = np.full((2, 40), 1e6, np.float32)
    write_gguf(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": values}, {})
    with pytest.raises(ValueError, match=r"ffn_up\.weight: .*beyond the range of F16"):
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_0")


@pytest.mark.parametrize("mix", MIXES)
def test_the_engine_runs_every_type(tiny_opt: Path, tmp_path: Path, mix: str) -> None:
    from h2o_cpp import Generator

    quantize(tiny_opt, tmp_path / "out.gguf", mix)
    with Generator(tmp_path / "out.gguf", threads=2) as generator:
        stream = generator.stream("The old man", max_tokens=8, temperature=0.0)
        assert "".join(stream)


def run_cli(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    status = main(["quantize", *map(str, args)])
    captured = capsys.readouterr()
    assert captured.out == ""
    return status, captured.err


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.gguf"
    status, err = run_cli(capsys, source, output, "q4_k_m", "--threads", "1")
    assert (status, err) == (0, f"wrote {output} ({output.stat().st_size / 2**20:.2f} MiB)\n")
    assert types(output)["blk.0.ffn_up.weight"] == "Q4_K"


def test_errors_are_one_sentence(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.gguf"

    def fails(*args: object) -> str:
        status, message = run_cli(capsys, *args)
        assert status == 1
        assert message.startswith("error: ")
        assert message.count("\n") == 1
        return message

    assert "choose from Q8_0, Q6_K, Q5_K_M" in fails(source, output, "Q3_K")
    assert "missing.gguf" in fails(tmp_path / "missing.gguf", output, "Q4_0")
    (tmp_path / "text.gguf").write_text("not a model")
    assert "text.gguf" in fails(tmp_path / "text.gguf", output, "Q4_0")
    assert "the output is the input" in fails(source, source, "Q4_0")
    (tmp_path / "link.gguf").symlink_to(source)
    assert "the output is the input" in fails(source, tmp_path / "link.gguf", "Q4_0")
    assert "no such directory" in fails(source, tmp_path / "none" / "out.gguf", "Q4_0")
    assert "not a regular file" in fails(source, tmp_path, "Q4_0")
    assert "threads=0" in fails(source, output, "Q4_0", "--threads", "0")
    assert not output.exists()


def test_fewer_than_8_bits_are_quantised_again_only_on_demand(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, again = tmp_path / "small.gguf", tmp_path / "again.gguf"
    quantize(source, small, "Q5_0")
    status, message = run_cli(capsys, small, again, "Q4_0")
    assert status == 1
    assert "token_embd.weight is Q5_0 already" in message
    assert "--allow-requantize" in message
    assert not again.exists()
    assert run_cli(capsys, small, again, "Q4_0", "--allow-requantize")[0] == 0
    assert types(again)["token_embd.weight"] == "Q4_0"
    quantize(small, again, "Q5_0")  # nothing to do: not refused
    assert again.read_bytes() == small.read_bytes()


def test_a_type_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with closing(GGUFWriter(tmp_path / "in.gguf", "llama")) as writer:
        type = GGMLQuantizationType.IQ2_XXS
        writer.add_tensor("a.weight", np.zeros((2, 66), np.uint8), raw_dtype=type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    with pytest.raises(ValueError, match=r"a\.weight is IQ2_XXS, which cannot be read"):
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_0", allow_requantize=True)


def test_the_tool(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Path(__file__).parents[2] / "tools" / "quantize"
    assert os.access(tool, os.X_OK)
    monkeypatch.setattr(sys, "argv", ["quantize", str(source), str(tmp_path / "o.gguf"), "Q8_0"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(tool), run_name="__main__")
    assert types(tmp_path / "o.gguf")["output.weight"] == "Q8_0"
