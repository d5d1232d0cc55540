"""The cache options that advise() found for a model, in the metadata of its GGUF file (h2o.*)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypeVar

from h2o_cpp import _core
from h2o_cpp.model.arguments import KvDType, types_text
from h2o_cpp.model.policy import POLICIES
from h2o_cpp.model.stored_metadata import store_metadata

Budget: TypeAlias = float | Literal["auto"] | None
P = TypeVar("P")  # a policy argument

_HH, _POLICY, _KV_DTYPE = "h2o.hh", "h2o.policy", "h2o.kv_dtype"
_ARCHIVE, _ARCHIVE_PAGES, _ARCHIVE_HEADS = "h2o.archive", "h2o.archive_pages", "h2o.archive_heads"
_OF_EVERY_BUDGET = (_HH, _POLICY, "h2o.n_ctx", "h2o.loss", _KV_DTYPE)
_OF_AN_ARCHIVE = (_ARCHIVE, _ARCHIVE_PAGES, _ARCHIVE_HEADS)


def stored_budget(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """What store_budget() stored, by the names of its arguments, without checks; None if nothing.

    Those of an archive are missing if they were not stored.
    """
    if _HH not in metadata:
        return None
    found = {key: metadata.get(key) for key in _OF_EVERY_BUDGET}
    found |= {key: metadata[key] for key in _OF_AN_ARCHIVE if key in metadata}
    return {key.removeprefix("h2o."): value for key, value in found.items()}


def resolve_budget(
    hh: Budget, policy: P, file: _core.GgufFile, *, recent: float | None = None
) -> tuple[float | None, P | str]:
    """hh and policy; if hh is "auto", the file's recommendation.

    Raises ValueError if the file has none, or an invalid one, and if policy or recent is given too.
    """
    if not isinstance(hh, str):
        return hh, policy
    if hh != "auto":
        raise ValueError(f"hh={hh!r}, expected a fraction, a number of tokens or 'auto'")
    for name, value in (("policy", policy), ("recent", recent)):
        if value is not None:
            raise ValueError(f"hh='auto' includes a policy, expected hh as a number with {name}=")
    metadata = file.metadata()
    if _HH not in metadata:
        raise ValueError(
            f"{file.path}: no recommended budget for hh='auto'; find and store one with: h2o-cpp "
            f"advise {file.path} TEXT --write"
        )
    stored, name = metadata[_HH], metadata.get(_POLICY, "h2o")
    if not isinstance(stored, float) or not 0 < stored <= 1:
        raise ValueError(
            f"{file.path}: {_HH} is {stored!r}, expected a fraction above 0 and up to 1"
        )
    if name not in POLICIES:
        raise ValueError(
            f"{file.path}: {_POLICY} is {name!r}, expected one of {', '.join(POLICIES)}"
        )
    return stored, name


def resolve_types(hh: Budget, kv_dtype: KvDType | None, file: _core.GgufFile) -> KvDType:
    """kv_dtype; if None, the file's recommendation with hh="auto", otherwise f16.

    Raises ValueError if the recommendation is invalid.
    """
    if kv_dtype is not None:
        return kv_dtype
    return _types(file, _KV_DTYPE) if hh == "auto" and _KV_DTYPE in file.metadata() else "f16"


def resolve_archive(
    hh: Budget,
    archive: KvDType | None,
    pages: int | None,
    heads: float | None,
    file: _core.GgufFile,
) -> tuple[KvDType | None, int | None, float | None]:
    """archive, archive_pages and archive_heads; if archive is None and hh is "auto", the file's
    recommendation.

    Raises ValueError if the types are invalid.
    """
    metadata = file.metadata()
    if archive is not None or hh != "auto" or _ARCHIVE not in metadata:
        return archive, pages, heads
    return _types(file, _ARCHIVE), metadata.get(_ARCHIVE_PAGES), metadata.get(_ARCHIVE_HEADS)


def _types(file: _core.GgufFile, key: str) -> KvDType:
    """A type, or two, separated by a comma."""
    stored = file.metadata()[key]
    types = stored.split(",") if isinstance(stored, str) else []
    if not 1 <= len(types) <= 2 or not all(types):
        raise ValueError(f"{file.path}: {key} is {stored!r}, expected a type, or two")
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
    archive: KvDType | None = None,
    archive_pages: int | None = None,
    archive_heads: float | None = None,
) -> None:
    """Write cache options into the metadata of a GGUF file, as defaults for this model.

    Generator(path, hh="auto") and --hh auto read them; llama.cpp ignores the keys (h2o.*), and the
    tensors stay as they are. source, output, errors: as for store_metadata().

    hh, policy, kv_dtype, archive...: as for Generator. n_ctx, loss: the context in which the cost
    was measured, and the relative increase of perplexity there.
    """
    store_metadata(
        source,
        output,
        {
            _HH: float(hh),
            _POLICY: policy,
            "h2o.n_ctx": n_ctx,
            "h2o.loss": float(loss),
            _KV_DTYPE: types_text(kv_dtype),
            _ARCHIVE: None if archive is None else types_text(archive),
            _ARCHIVE_PAGES: archive_pages,
            _ARCHIVE_HEADS: None if archive_heads is None else float(archive_heads),
        },
    )
