"""Corrupt and malicious GGUF files raise one clear error with the file's name, never crash."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_cpp import Generator
from support.random_search import examples
from support.scripted_opt import ARRAY, F16, STRING, U32, Gguf, f32, scripted_opt, string, u32

SCRIPT = list(b"hello")
GOOD = scripted_opt(SCRIPT, n_ctx=16)
DATA = GOOD.encode()
TENSORS = list(GOOD.tensors)
KEYS = [key for key in GOOD.keys if key.startswith(("opt.", "tokenizer.", "general.arch"))]
OPTIONAL_KEYS = {"tokenizer.ggml.token_type", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.pre"}
OPTIONAL_KEYS |= {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token"}


def good() -> Gguf:
    """A copy of GOOD, to be modified."""
    return Gguf(dict(GOOD.keys), {name: replace(t) for name, t in GOOD.tensors.items()})


def refused(path: Path, data: bytes, *messages: str) -> None:
    """Check that loading `data` raises a ValueError with the file's name and the messages."""
    path = path / "model.gguf" if path.is_dir() else path
    path.write_bytes(data)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is checked below
        Generator(path, threads=1)
    for message in (path.name, *messages):
        assert message in str(error.value)


def broken(path: Path, change: Callable[[Gguf], object], *messages: str) -> None:
    """Check the same for GOOD after `change`."""
    file = good()
    change(file)
    refused(path, file.encode(), *messages)


def patched(offset: int, form: str, value: int) -> bytes:
    data = bytearray(DATA)
    struct.pack_into(form, data, offset, value)
    return bytes(data)


def test_unmodified_file_loads(tmp_path: Path) -> None:
    for version in (2, 3):
        path = tmp_path / f"{version}.gguf"
        path.write_bytes(patched(4, "<I", version))
        assert Generator(path, threads=1).generate([1], temperature=0).text == "hello"


class TestHeader:
    def test_empty(self, tmp_path: Path) -> None:
        refused(tmp_path, b"", "empty")

    @pytest.mark.parametrize("magic", [b"GGUX", b"FUGG", b"ggml", b"\0\0\0\0", b"PK\5\6"])
    def test_magic(self, tmp_path: Path, magic: bytes) -> None:
        refused(tmp_path, magic + DATA[4:], "GGUF")
        refused(tmp_path, magic, "GGUF")

    @pytest.mark.parametrize("version", [0, 1, 4, 2**31, 3 << 24, 2**32 - 1])
    def test_version(self, tmp_path: Path, version: int) -> None:
        swapped = version == 3 << 24
        refused(tmp_path, patched(4, "<I", version), "byte-swapped" if swapped else str(version))

    @pytest.mark.parametrize("offset", [8, 16])
    @pytest.mark.parametrize("count", [-1, 1, 1000, 2**31, 2**32, 2**48, 2**63, 2**64 - 1])
    def test_tensor_and_key_counts(self, tmp_path: Path, offset: int, count: int) -> None:
        """Counts that are one too small or too large, and absolute ones."""
        true = len(GOOD.tensors if offset == 8 else GOOD.keys)
        refused(tmp_path, patched(offset, "<Q", true + count if count in (-1, 1) else count))


class TestTruncation:
    @pytest.mark.parametrize("part", range(4))
    def test_any_length(self, tmp_path: Path, part: int) -> None:
        lengths = np.linspace(0, len(DATA) - 1, 200).astype(int).tolist() + GOOD.boundaries()
        for length in sorted(set(lengths))[part::4]:
            refused(tmp_path / f"{length}.gguf", DATA[:length])
            (tmp_path / f"{length}.gguf").unlink()

    def test_every_length_of_header(self, tmp_path: Path) -> None:
        for length in range(len(b"".join(GOOD.fields()[:10]))):
            refused(tmp_path / f"{length}.gguf", DATA[:length])

    def test_trailing_bytes_are_ignored(self, tmp_path: Path) -> None:
        path = tmp_path / "long.gguf"
        path.write_bytes(DATA + bytes(1000))
        assert Generator(path, threads=1).generate([1], temperature=0).text == "hello"


class TestMetadata:
    @pytest.mark.parametrize("key", KEYS)
    def test_missing(self, tmp_path: Path, key: str) -> None:
        file = good()
        del file.keys[key]
        if key not in OPTIONAL_KEYS:
            refused(tmp_path, file.encode(), key, "missing")
        else:
            assert Generator(file.write(tmp_path / "model.gguf"), threads=1).tokenize("x")

    @pytest.mark.parametrize("key", KEYS)
    def test_wrong_type(self, tmp_path: Path, key: str) -> None:
        wrong = u32(1) if GOOD.keys[key][0] in (STRING, ARRAY) else string("1")
        broken(tmp_path, lambda f: f.keys.update({key: wrong}), key)

    @pytest.mark.parametrize("value", [0, 2**24 + 1, 2**31, 2**32 - 1])
    @pytest.mark.parametrize("key", [k for k in KEYS if k.startswith("opt.") and "eps" not in k])
    def test_sizes_out_of_range(self, tmp_path: Path, key: str, value: int) -> None:
        broken(tmp_path, lambda f: f.keys.update({key: u32(value)}), key, str(value))

    @pytest.mark.parametrize("value", [-1, 2**40, 2**63 - 1])
    def test_64_bit_sizes_out_of_range(self, tmp_path: Path, value: int) -> None:
        encoded = struct.pack("<Iq", 11, value)
        broken(tmp_path, lambda f: f.keys.update({"opt.block_count": encoded}), str(value))

    @pytest.mark.parametrize("value", [0.0, -1e-5, float("inf"), float("nan")])
    def test_epsilon_out_of_range(self, tmp_path: Path, value: float) -> None:
        key = "opt.attention.layer_norm_epsilon"
        broken(tmp_path, lambda f: f.keys.update({key: f32(value)}), key)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("head_count", 3),
            ("head_count", 32),
            ("head_count_kv", 3),
            ("head_count_kv", 4),
            ("head_count_kv", 0),
        ],
    )
    def test_head_counts_that_do_not_divide(self, tmp_path: Path, key: str, value: int) -> None:
        broken(tmp_path, lambda f: f.keys.update({f"opt.attention.{key}": u32(value)}), key)

    @pytest.mark.parametrize("name", ["mamba", "OPT", "", "opt\0", "x" * 1000, "\u2400🦙"])
    def test_unknown_architecture(self, tmp_path: Path, name: str) -> None:
        change = {"general.architecture": string(name)}
        broken(tmp_path, lambda f: f.keys.update(change), "architecture", "opt")

    def test_architecture_that_is_not_utf8(self, tmp_path: Path) -> None:
        """The message escapes the invalid bytes."""
        name = struct.pack("<IQ", STRING, 3) + b"\xff\xfe!"
        broken(tmp_path, lambda f: f.keys.update({"general.architecture": name}), "architecture")

    @pytest.mark.parametrize("value", [0, 1, 3, 4, 48, 2**31 + 1])
    def test_alignment(self, tmp_path: Path, value: int) -> None:
        change = {"general.alignment": u32(value)}
        broken(tmp_path, lambda f: f.keys.update(change), "general.alignment")

    def test_twice(self, tmp_path: Path) -> None:
        refused(tmp_path, DATA.replace(b"general.type", b"general.name"), "general.name", "twice")

    @pytest.mark.parametrize(
        "value",
        [
            struct.pack("<I", 13),
            struct.pack("<I", 2**32 - 1),
            struct.pack("<IB", 7, 2),  # a bool
            struct.pack("<IQ", STRING, 2**64 - 1),
            struct.pack("<IQ", STRING, 2**31),
            struct.pack("<IIQ", ARRAY, U32, 2**62),
            struct.pack("<IIQ", ARRAY, U32, 2**64 - 1),
            struct.pack("<IIQ", ARRAY, STRING, 2**61),
            struct.pack("<IIQ", ARRAY, 13, 1),
            struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 1000,
            struct.pack("<IIQ", ARRAY, ARRAY, 2**60),
        ],
        ids=bytes.hex,
    )
    def test_malformed_values(self, tmp_path: Path, value: bytes) -> None:
        broken(tmp_path, lambda f: f.keys.update({"evil.key": value}), "evil.key")

    @pytest.mark.parametrize("key", ["", "k" * 65536])
    def test_names(self, tmp_path: Path, key: str) -> None:
        broken(tmp_path, lambda f: f.keys.update({key: u32(1)}), f"{len(key)} bytes")

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("model", string("rwkv"), "'rwkv'"),
            ("pre", string("jais-2"), "'jais-2'"),
            ("tokens", struct.pack("<IIQ", ARRAY, STRING, 0), "258"),
            ("merges", struct.pack("<IIQI", ARRAY, U32, 1, 1), "merges"),
            ("bos_token_id", struct.pack("<IQ", 10, 2**40), "bos_token_id is 1099511627776"),
            ("add_bos_token", u32(1), "add_bos_token"),
        ],
    )
    def test_tokenizer_metadata(self, tmp_path: Path, key: str, value: bytes, message: str) -> None:
        """See test_tokenizer.py for more."""
        broken(tmp_path, lambda f: f.keys.update({f"tokenizer.ggml.{key}": value}), message)


class TestTensors:
    @pytest.mark.parametrize("name", [name for name in TENSORS if name != "output.weight"])
    def test_missing(self, tmp_path: Path, name: str) -> None:
        broken(tmp_path, lambda f: f.tensors.pop(name), name, "missing")

    def test_output_weight_is_optional(self, tmp_path: Path) -> None:
        file = good()
        del file.tensors["output.weight"]
        Generator(file.write(tmp_path / "tied.gguf"), threads=1).generate([1], max_tokens=1)

    @pytest.mark.parametrize("name", TENSORS)
    def test_shapes(self, tmp_path: Path, name: str) -> None:
        """One row less, an extra dimension, flattened; a vector as a column."""
        first, *rest = GOOD.tensors[name].dims
        shapes = {(first, *rest[:-1], rest[-1] - 1) if rest else (first - 1,), (first, *rest, 2)}
        shapes |= {(first * rest[0],), (first, 1, *rest)} if rest else {(1, first)}
        for n, dims in enumerate(sorted(shapes)):
            # The data is large enough, so that only the shape is wrong.
            data = GOOD.tensors[name].data + bytes(len(GOOD.tensors[name].data))
            wrong = replace(GOOD.tensors[name], dims=dims, data=data)
            file = good()
            file.tensors[name] = wrong
            # token_embd defines the vocabulary size, so the error may name another tensor.
            refused(tmp_path / f"{n}.gguf", file.encode(), name.removeprefix("token_embd"))

    @pytest.mark.parametrize("name", [n for n, t in GOOD.tensors.items() if len(t.dims) == 1])
    def test_vectors_must_be_f32(self, tmp_path: Path, name: str) -> None:
        wrong = replace(GOOD.tensors[name], type=F16)
        broken(tmp_path, lambda f: f.tensors.update({name: wrong}), name, "F16", "F32")

    @pytest.mark.parametrize(
        ("type", "message"),
        [(2, "Q4_0"), (12, "16"), (26, "I32"), (4, "4"), (255, "255"), (2**32 - 1, "4294967295")],
    )
    def test_types(self, tmp_path: Path, type: int, message: str) -> None:
        """Unsupported, partial blocks, removed from ggml, unknown."""
        name, columns = "blk.0.ffn_down.weight", 16 if type == 12 else 32
        wrong = replace(GOOD.tensors[name], type=type, dims=(columns, 4), data=bytes(4096))
        broken(tmp_path, lambda f: f.tensors.update({name: wrong}), name, message)

    @pytest.mark.parametrize(
        "dims",
        [(), (16,) * 5, (0,), (16, 0), (2**63,), (2**32, 2**32), (2**31,) * 4, (2**64 - 1,)],
        ids=str,
    )
    def test_dimensions(self, tmp_path: Path, dims: tuple[int, ...]) -> None:
        name = "blk.0.attn_q.weight"
        wrong = replace(GOOD.tensors[name], dims=dims)
        broken(tmp_path, lambda f: f.tensors.update({name: wrong}), name)

    @pytest.mark.parametrize("count", [0, 5, 2**31, 2**32 - 1])
    def test_number_of_dimensions(self, tmp_path: Path, count: int) -> None:
        at = DATA.index(b"blk.0.attn_q.bias") + len("blk.0.attn_q.bias")
        refused(tmp_path, patched(at, "<I", count), "blk.0.attn_q.bias", f"{count} dimensions")

    @pytest.mark.parametrize("name", TENSORS)
    @pytest.mark.parametrize("offset", [1, 31, 2**20, 2**63, 2**64 - 32, 2**64 - 1])
    def test_offset_out_of_range(self, tmp_path: Path, name: str, offset: int) -> None:
        broken(tmp_path, lambda f: setattr(f.tensors[name], "offset", offset), name, str(offset))

    @pytest.mark.parametrize("name", TENSORS[1:])
    def test_overlapping(self, tmp_path: Path, name: str) -> None:
        broken(tmp_path, lambda f: setattr(f.tensors[name], "offset", 0), "overlap")

    def test_overlapping_by_last_block(self, tmp_path: Path) -> None:
        size = len(GOOD.tensors["token_embd.weight"].data)
        before = size - 1 - (size - 1) % 32
        name = "position_embd.weight"
        broken(tmp_path, lambda f: setattr(f.tensors[name], "offset", before), "overlap", name)

    def test_twice(self, tmp_path: Path) -> None:
        data = DATA.replace(b"blk.0.attn_q.bias", b"blk.0.attn_k.bias")
        refused(tmp_path, data, "blk.0.attn_k.bias", "twice")

    @pytest.mark.parametrize("name", ["", "n" * 65])
    def test_names(self, tmp_path: Path, name: str) -> None:
        tensor = GOOD.tensors["output_norm.bias"]
        broken(tmp_path, lambda f: f.tensors.update({name: tensor}), f"{len(name)} bytes")

    def test_unprintable_names_are_escaped(self, tmp_path: Path) -> None:
        name, evil = b"blk.0.attn_q.bias", b"\x1b[31m\xff\x00\n.bias...."
        data = patched(DATA.index(name) + len(name), "<I", 9).replace(name, evil)
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        with pytest.raises(ValueError, match="9 dimensions") as error:
            Generator(path)
        assert str(error.value).isprintable()


@settings(max_examples=examples(100))
@given(st.data())
def test_random_corruption(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """With changed bytes in header, metadata or tensor list, it loads or raises ValueError."""
    size = DATA.index(b"output.weight") + 100
    changes = data.draw(st.dictionaries(st.integers(4, size), st.integers(0, 255), min_size=1))
    content = bytearray(DATA)
    for at, byte in changes.items():
        content[at] = byte
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    path.write_bytes(content)
    try:
        with Generator(path, threads=1) as generator:
            generator.generate([1, 2], max_tokens=3, seed=1)
    except ValueError as error:
        assert "model.gguf" in str(error)  # noqa: PT017 - no error is fine too
    finally:
        path.unlink()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("name", ["output.weight", "output_norm.weight", "position_embd.weight"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_non_finite_weights_generate_valid_tokens(
    tmp_path: Path, value: float, name: str, temperature: float
) -> None:
    file = good()
    tensor = file.tensors[name]
    tensor.data = np.full(tensor.dims, value, np.float32).tobytes()
    with Generator(file.write(tmp_path / "nan.gguf"), hh=4, threads=1) as generator:
        stream = generator.stream([1, 2], temperature=temperature, ignore_eos=True, top_k=0)
        assert all(isinstance(piece, str) for piece in stream)
        assert all(0 <= token < 258 for token in stream.tokens)
