"""Split models."""

from __future__ import annotations

import shutil
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from h2o_cpp import Generator
from h2o_cpp.budget.stored_budget import store_budget
from h2o_cpp.cli import main

TOKENS = np.arange(5, 30)


@cache
def read(path: Path) -> GGUFReader:
    return GGUFReader(path)


@pytest.fixture(scope="module")
def written_parts(tiny_opt: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, split by gguf-py with 40 tensors per file."""
    folder = tmp_path_factory.mktemp("parts")
    source = read(tiny_opt)
    with closing(GGUFWriter(folder / "m.gguf", "opt", split_max_tensors=40)) as writer:
        for key, field in source.fields.items():
            if not key.startswith(("GGUF.", "general.architecture")):
                sub_type = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], sub_type)
        for tensor in source.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return folder


@pytest.fixture
def parts(written_parts: Path, tmp_path: Path) -> list[Path]:
    """Copies, which a test may damage."""
    return sorted(Path(shutil.copy(part, tmp_path)) for part in written_parts.iterdir())


def test_logits_equal_those_of_the_unsplit_model(tiny_opt: Path, parts: list[Path]) -> None:
    assert [path.name for path in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    with Generator(tiny_opt) as full, Generator(parts[0]) as split:
        np.testing.assert_array_equal(split.logits(TOKENS), full.logits(TOKENS))


def test_only_the_first_file_opens_the_model(parts: list[Path]) -> None:
    with pytest.raises(ValueError, match="file 2 of 3 of a split model, open the first"):
        Generator(parts[1])


def test_missing_file(parts: list[Path]) -> None:
    parts[2].unlink()
    with pytest.raises(FileNotFoundError, match=parts[2].name):
        Generator(parts[0])


def test_swapped_files_are_rejected(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ValueError, match=rf"{parts[1].name}: is not file 2 of 3"):
        Generator(parts[0])


def test_renamed_file_is_rejected(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("first.gguf"))
    with pytest.raises(ValueError, match=r"must end in -00001-of-00003\.gguf"):
        Generator(renamed)


def test_truncated_file_is_rejected(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-1000])
    with pytest.raises(ValueError, match=parts[1].name):
        Generator(parts[0])


def with_keys(source: Path, output: Path, keys: dict[str, tuple[Any, GGUFValueType]]) -> Path:
    """A copy of a GGUF file with additional metadata."""
    reader = read(source)
    with closing(GGUFWriter(output, "opt")) as writer:
        for key, field in reader.fields.items():
            if not key.startswith(("GGUF.", "general.architecture")):
                sub_type = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], sub_type)
        for key, (value, kind) in keys.items():
            writer.add_key_value(key, value, kind)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return output


N_TENSORS = 100
U16, I32, STRING = GGUFValueType.UINT16, GGUFValueType.INT32, GGUFValueType.STRING


@pytest.mark.parametrize("count", [0, 1])
def test_opens_a_merged_model(tiny_opt: Path, tmp_path: Path, count: int) -> None:
    """llama.cpp keeps the keys of the first part, with a count of 0."""
    keys = {"split.no": (0, U16), "split.count": (count, U16)}
    keys["split.tensors.count"] = (N_TENSORS, I32)
    full = with_keys(tiny_opt, tmp_path / "merged.gguf", keys)
    with Generator(tiny_opt) as expected, Generator(full) as merged:
        np.testing.assert_array_equal(merged.logits(TOKENS), expected.logits(TOKENS))
    stored: dict[str, Any] = {"hh": 0.01, "policy": "window", "n_ctx": 512, "loss": 0.0}
    store_budget(full, tmp_path / "advised.gguf", **stored)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"split.count": (-1, I32)}, "split.count is -1"),
        ({"split.count": (100_000, I32)}, "split.count is 100000"),
        ({"split.count": ("x", STRING)}, "'split.count': string, expected an integer"),
        ({"split.count": (2, U16)}, "'split.no': missing"),
        ({"split.count": (1, U16), "split.no": (4, U16)}, "is file 5 of 1 of a split model"),
        ({"split.tensors.count": (105, I32)}, "has 100 tensors, split.tensors.count is 105"),
    ],
    ids=str,
)
def test_invalid_split_metadata(
    tiny_opt: Path, tmp_path: Path, keys: dict[str, tuple[Any, GGUFValueType]], message: str
) -> None:
    invalid = with_keys(tiny_opt, tmp_path / "wrong.gguf", keys)
    with pytest.raises(ValueError, match=message):
        Generator(invalid)
    assert main(["info", str(invalid)]) == 0  # info only prints the metadata
    if keys.get("split.count", (1,))[0] != 1:
        stored: dict[str, Any] = {"hh": 0.01, "policy": "window", "n_ctx": 512, "loss": 0.0}
        with pytest.raises(ValueError, match=r"expected the name wrong\.gguf"):
            store_budget(invalid, tmp_path / "advised.gguf", **stored)


def test_store_budget_in_the_first_file(tiny_opt: Path, parts: list[Path]) -> None:
    """Under its own name, which the other files expect."""
    stored: dict[str, Any] = {"hh": 0.01, "policy": "window", "n_ctx": 512, "loss": 0.0}
    store_budget(parts[0], **stored)
    options: dict[str, Any] = {"hh": 0.01, "policy": "window"}
    with Generator(tiny_opt, **options) as full, Generator(parts[0], hh="auto") as split:
        assert split.policy == full.policy
        np.testing.assert_array_equal(split.logits(TOKENS), full.logits(TOKENS))
    with pytest.raises(ValueError, match=f"expected the name {parts[0].name}"):
        store_budget(parts[0], parts[0].with_name("advised.gguf"), **stored)
