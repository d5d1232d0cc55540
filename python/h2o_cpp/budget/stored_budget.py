"""The cache options that advise() found for a model, in the metadata of its GGUF file (h2o.*)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from h2o_cpp.arguments import KvDType, types_text
from h2o_cpp.budget.policy import POLICIES
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.files.stored_metadata import store_metadata

Budget: TypeAlias = float | Literal["auto"] | None

_HH, _POLICY, _KV_DTYPE = "h2o.hh", "h2o.policy", "h2o.kv_dtype"
_ARCHIVE, _ARCHIVE_PAGES, _ARCHIVE_HEADS = "h2o.archive", "h2o.archive_pages", "h2o.archive_heads"
_BUDGET_KEYS = (_HH, _POLICY, "h2o.n_ctx", "h2o.loss", _KV_DTYPE)
_ARCHIVE_KEYS = (_ARCHIVE, _ARCHIVE_PAGES, _ARCHIVE_HEADS)


def stored_budget(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what store_budget() stored, by its arguments' names, unchecked; None if nothing.

    Those of an archive are missing if they were not stored.
    """
    if _HH not in metadata:
        return None
    found = {key: metadata.get(key) for key in _BUDGET_KEYS}
    found |= {key: metadata[key] for key in _ARCHIVE_KEYS if key in metadata}
    return {key.removeprefix("h2o."): value for key, value in found.items()}


def read_budget(file: ModelFile) -> dict[str, Any]:
    """The options of Generator that store_budget() stored, those for hh="auto".

    Raises ValueError if the file has none, or invalid ones.
    """
    metadata = file.metadata
    if _HH not in metadata:
        raise ValueError(
            f"{file.path}: no recommended budget for hh='auto'; find and store one with: h2o-cpp "
            f"advise {file.path} TEXT --write"
        )
    hh, policy = metadata[_HH], metadata.get(_POLICY, "h2o")
    if not isinstance(hh, float) or not 0 < hh <= 1:
        raise ValueError(f"{file.path}: {_HH} is {hh!r}, expected a fraction above 0 and up to 1")
    if policy not in POLICIES:
        raise ValueError(
            f"{file.path}: {_POLICY} is {policy!r}, expected one of {', '.join(POLICIES)}"
        )
    found: dict[str, Any] = {"hh": hh, "policy": policy}
    if _KV_DTYPE in metadata:
        found["kv_dtype"] = _types(file, _KV_DTYPE)
    if _ARCHIVE in metadata:
        found["archive"] = _types(file, _ARCHIVE)
        for key in (_ARCHIVE_PAGES, _ARCHIVE_HEADS):
            found[key.removeprefix("h2o.")] = metadata.get(key)
    return found


def _types(file: ModelFile, key: str) -> KvDType:
    """A type, or two, separated by a comma."""
    stored = file.metadata[key]
    types = stored.split(",") if isinstance(stored, str) else []
    if not 1 <= len(types) <= 2 or not all(types):
        raise ValueError(f"{file.path}: {key} is {stored!r}, expected a type, or two")
    return types[0] if len(types) == 1 else (types[0], types[1])


def store_budget(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    n_ctx: int,
    loss: float,
    **options: Any,
) -> None:
    """Write cache options into the metadata of a GGUF file, as defaults for this model.

    Generator(path, hh="auto") reads them; llama.cpp ignores the keys (h2o.*), and the tensors stay
    as they are. source, output, errors: as for store_metadata().

    n_ctx, loss: the context in which the cost was measured, and the relative increase of perplexity
    there. options: hh and policy, and kv_dtype, archive, archive_pages and archive_heads as for
    Generator.
    """
    archive, heads = options.get("archive"), options.get("archive_heads")
    store_metadata(
        source,
        output,
        {
            _HH: float(options["hh"]),
            _POLICY: options["policy"],
            "h2o.n_ctx": n_ctx,
            "h2o.loss": float(loss),
            _KV_DTYPE: types_text(options.get("kv_dtype", "f16")),
            _ARCHIVE: None if archive is None else types_text(archive),
            _ARCHIVE_PAGES: options.get("archive_pages"),
            _ARCHIVE_HEADS: None if heads is None else float(heads),
        },
    )
