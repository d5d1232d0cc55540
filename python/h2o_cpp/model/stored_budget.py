"""The recommended budget in a GGUF file (keys h2o.*), used by hh="auto"."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal, TypeAlias, TypeVar

from h2o_cpp import _core
from h2o_cpp.model.atomic import atomic_output, check_output
from h2o_cpp.model.policy import POLICIES

Budget: TypeAlias = float | Literal["auto"] | None
P = TypeVar("P")  # a policy argument

KvDType: TypeAlias = str | tuple[str, str]
HH, POLICY, N_CTX, LOSS = "h2o.hh", "h2o.policy", "h2o.n_ctx", "h2o.loss"
KV_DTYPE = "h2o.kv_dtype"

_ALIGNMENT = 32  # GGUF's default alignment
_COUNTS = struct.Struct("<4sIQQ")  # GGUF header: magic, version, tensor count, metadata count


def resolve_budget(
    hh: Budget, policy: P, file: _core.GgufFile, *, recent: float | None = None
) -> tuple[float | None, P | str]:
    """hh and policy; if hh is "auto", the file's recommendation.

    Raises ValueError if the file has none, or an invalid one, and if policy or recent is given too.
    """
    if hh is None or not isinstance(hh, str):
        return hh, policy
    if hh != "auto":
        raise ValueError(f"hh={hh!r}, expected a fraction, a number of tokens or 'auto'")
    for name, value in (("policy", policy), ("recent", recent)):
        if value is not None:
            raise ValueError(f"hh='auto' includes a policy, expected hh as a number with {name}=")
    metadata = file.metadata()
    if HH not in metadata:
        raise ValueError(
            f"{file.path}: no recommended budget for hh='auto'; find and store one with: h2o-cpp "
            f"advise {file.path} TEXT --write"
        )
    stored, name = metadata[HH], metadata.get(POLICY, "h2o")
    if not isinstance(stored, float) or not 0 < stored <= 1:
        raise ValueError(
            f"{file.path}: {HH} is {stored!r}, expected a fraction above 0 and up to 1"
        )
    if name not in POLICIES:
        raise ValueError(
            f"{file.path}: {POLICY} is {name!r}, expected one of {', '.join(POLICIES)}"
        )
    return stored, name


def resolve_types(hh: Budget, kv_dtype: KvDType | None, file: _core.GgufFile) -> KvDType:
    """kv_dtype; if None, the file's recommendation with hh="auto", otherwise f16.

    Raises ValueError if the recommendation is invalid.
    """
    if kv_dtype is not None:
        return kv_dtype
    stored = file.metadata().get(KV_DTYPE, "f16") if hh == "auto" else "f16"
    types = stored.split(",") if isinstance(stored, str) else []
    if not 1 <= len(types) <= 2 or not all(types):
        raise ValueError(f"{file.path}: {KV_DTYPE} is {stored!r}, expected a type, or two")
    return types[0] if len(types) == 1 else (types[0], types[1])


def store_budget(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    hh: float,
    policy: str,
    n_ctx: int,
    loss: float,
    kv_dtype: KvDType = "f16",
) -> None:
    """Rewrite a GGUF file with this recommended budget.

    source: a GGUF file; for a split model, the first part.
    output: the file to write; default: replace `source`. It is complete or unchanged.
    hh, policy, kv_dtype: as for Generator. n_ctx, loss: the context and the measured loss there.

    Everything else is copied byte for byte. Raises FileNotFoundError, ValueError (a symbolic link,
    or another name for a part of a split model) and OSError.
    """
    target = budget_output(source, output)
    path = Path(source)
    file = _core.GgufFile(path)
    metadata = file.metadata()
    types = kv_dtype if isinstance(kv_dtype, str) else ",".join(kv_dtype)
    entries = dict(file.metadata_entries())
    begin = _COUNTS.size + sum(map(len, entries.values()))
    for key, value in (
        (HH, struct.pack("<Id", 12, hh)),
        (POLICY, struct.pack("<I", 8) + _string(policy)),
        (N_CTX, struct.pack("<II", 4, n_ctx)),
        (LOSS, struct.pack("<Id", 12, loss)),
        (KV_DTYPE, struct.pack("<I", 8) + _string(types)),
    ):
        entries[key] = _string(key) + value
    from shutil import copyfileobj  # slow to import

    alignment = metadata.get("general.alignment", _ALIGNMENT)
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


def budget_output(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = True,
) -> Path:
    """The file that store_budget() writes. Raises its errors about it, and FileExistsError."""
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


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
