"""Rewriting a GGUF file with other metadata."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeAlias

from h2o_cpp import _core
from h2o_cpp.files.atomic import atomic_output, check_output

# A float is stored as f64, an integer as u32, and integers as i32.
Value: TypeAlias = str | float | int | Sequence[int]

_ALIGNMENT = 32  # GGUF's default alignment
_COUNTS = struct.Struct("<4sIQQ")  # GGUF header: magic, version, tensor count, metadata count


def store_metadata(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    values: Mapping[str, Value | None],
) -> None:
    """Rewrite a GGUF file with these keys added or replaced; those with None are removed.

    source: a GGUF file; for a split model, the first part.
    output: the file to write; None: replace `source`. It is complete or unchanged.

    Everything else is copied byte for byte. Raises FileNotFoundError, ValueError (a symbolic link,
    or another name for a part of a split model) and OSError.
    """
    target = metadata_output(source, output)
    path = Path(source)
    file = _core.GgufFile(path)
    entries = dict(file.metadata_entries())
    begin = _COUNTS.size + sum(map(len, entries.values()))
    for key, value in values.items():
        if value is None:
            entries.pop(key, None)
        else:
            entries[key] = metadata_entry(key, value)
    from shutil import copyfileobj  # slow to import

    alignment = file.metadata().get("general.alignment", _ALIGNMENT)
    with path.open("rb") as before, atomic_output(target) as temporary:
        magic, version, n_tensors, _ = _COUNTS.unpack(before.read(_COUNTS.size))
        before.seek(begin)
        tensors = _read_tensors(before, n_tensors)
        head = _COUNTS.pack(magic, version, n_tensors, len(entries))
        head += b"".join(entries.values()) + tensors
        with temporary.open("wb") as after:
            after.write(head + bytes(-len(head) % alignment))
            before.seek(-before.tell() % alignment, os.SEEK_CUR)
            copyfileobj(before, after, 1 << 20)
        with suppress(OSError):
            temporary.chmod(path.stat().st_mode & 0o777)


def metadata_output(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    *,
    overwrite: bool = True,
) -> Path:
    """The file that store_metadata() writes. Raises its errors about it, and FileExistsError."""
    path = Path(source)
    target = path if output is None else Path(output)
    if target.is_symlink():
        raise ValueError(
            f"{target}: a symbolic link, as in the Hub's cache, expected another output"
        )
    check_output(target, overwrite=overwrite)
    n_parts = _core.GgufFile(path).metadata().get("split.count", 1)
    if n_parts not in (0, 1) and target.name != path.name:
        raise ValueError(f"{target}: a part of a split model, expected the name {path.name}")
    return target


def _read_tensors(file: IO[bytes], n: int) -> bytes:
    """The raw descriptions of n tensors: name, dimensions, type and offset."""
    parts = []
    for _ in range(n):
        parts.append(file.read(8))
        parts.append(file.read(*struct.unpack("<Q", parts[-1])))
        parts.append(file.read(4))
        (n_dims,) = struct.unpack("<I", parts[-1])
        parts.append(file.read(8 * n_dims + 12))
    return b"".join(parts)


def metadata_entry(key: str, value: Value) -> bytes:
    """A key, its type's number in GGUF and its value."""
    if isinstance(value, str):
        packed = struct.pack("<I", 8) + gguf_string(value)
    elif isinstance(value, int):
        packed = struct.pack("<II", 4, value)
    elif isinstance(value, float):
        packed = struct.pack("<Id", 12, value)
    else:
        packed = struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    return gguf_string(key) + packed


def gguf_string(text: str) -> bytes:
    """A string of a GGUF file, after its length."""
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data
