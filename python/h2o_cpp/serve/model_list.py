"""The models of a directory or a TOML file, each with its options."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from h2o_cpp.generator import Generator
from h2o_cpp.model.arguments import (
    archive_arguments,
    check_int,
    prefix_disk_bytes,
    thread_count,
)
from h2o_cpp.model.chat_template import read_template
from h2o_cpp.model.device import model_and_cache_bytes
from h2o_cpp.model.gguf_names import model_stem
from h2o_cpp.reply.formats import format_named
from h2o_cpp.serve.catalog import Entry
from h2o_cpp.serve.service import Service

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_OF_CACHE = (
    *("hh", "cache_memory", "recent", "policy", "n_ctx", "kv_dtype", "positions", "max_resident"),
)
_OF_SERVICE = ("template", "tool_parser", "max_queue", "max_tokens", "max_prompt")


def read_models(
    path: Path, generator: Mapping[str, Any], service: Mapping[str, Any]
) -> list[Entry]:
    """The models of a directory, named after their files, or of a TOML file with a table for each.

    generator, service: default options of Generator and Service.

    Raises FileNotFoundError, and ValueError for an invalid file or option.
    """
    if path.is_dir():
        tables = {name: {"model": str(file)} for name, file in _files(path).items()}
        if not tables:
            raise ValueError(f"{path}: there are no models in this directory (*.gguf)")
    else:
        tables = _read_toml(path)
    return [_entry(path, name, table, generator, service) for name, table in tables.items()]


def _files(folder: Path) -> dict[str, Path]:
    """The models in a directory by name; for a split model, its first file."""
    files = ((model_stem(file.name), file) for file in sorted(folder.glob("*.gguf")))
    return {stem: file for stem, file in files if stem is not None}


def _read_toml(path: Path) -> dict[str, dict[str, Any]]:
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for name, table in tables.items():
        if not isinstance(table, dict) or not isinstance(table.get("model"), str):
            raise ValueError(f'{path}: {name}: expected a table, [{name}], with model = "FILE"')
    if not tables:
        raise ValueError(f"{path}: there are no models in it")
    return tables


def _entry(
    path: Path,
    name: str,
    table: dict[str, Any],
    generator: Mapping[str, Any],
    service: Mapping[str, Any],
) -> Entry:
    own = dict(table)
    model = own.pop("model")
    beside = path.parent / model
    if "://" not in model and beside.exists():  # otherwise a pulled model or a Hub source
        model = str(beside)
    known = {*generator, *_OF_SERVICE}
    for option in own:
        if option not in known:
            close = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{path}: {name}: there is no option {option!r}{hint}")
    if "max_sequences" in own or "memory" in own:  # mutually exclusive, as on the command line
        generator = {**generator, "max_sequences": None, "memory": None}
    if "hh" in own or "cache_memory" in own:  # these too; recent is a part of hh
        budget = dict.fromkeys(generator.keys() & {"hh", "cache_memory", "recent"})
        generator = {**generator, **budget}
    options = {key: own.get(key, value) for key, value in generator.items()}
    limits = {**service, **{key: own[key] for key in _OF_SERVICE if key in own}}
    try:
        if "template" in own:
            limits["template"] = read_template(own["template"], path.parent)
        # A file of a directory may be no model.
        _check(None if path.is_dir() else model, {**options, **limits})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {name}: {error}") from None
    n_bytes, changed = _size(model)
    return Entry(
        name,
        partial(_load, name, model, options, limits),
        n_bytes=n_bytes,
        spec=(model, changed, options, limits),
    )


def _check(model: str | None, options: Mapping[str, Any]) -> None:
    """Check options, as far as possible without loading the model; None: those of any model.

    Raises ValueError, TypeError.
    """
    given = {name: value for name, value in options.items() if value is not None}
    thread_count(given.get("threads"))
    for name in ("n_batch", "max_sequences", "max_queue", "max_tokens", "max_prompt"):
        check_int(name, given.get(name, 1), 1)
    archive_arguments(*map(given.get, ("archive", "archive_pages", "archive_dir", "archive_heads")))
    prefix_disk_bytes(*map(given.get, ("prefix_cache_disk", "prefix_cache_disk_bytes")))
    if "tool_parser" in given:
        format_named(given["tool_parser"])
    if model is not None and os.path.isfile(model):
        model_and_cache_bytes(model, **{key: given[key] for key in _OF_CACHE if key in given})


def _load(
    name: str, model: str, options: Mapping[str, Any], limits: Mapping[str, Any], opened: ExitStack
) -> Service:
    generator = opened.enter_context(Generator(model, **options))
    return Service(generator, name=name, **limits)


def _size(model: str) -> tuple[int, float]:
    """A file's size and modification time; zeros if it is not a file."""
    try:
        found = os.stat(model)
    except (OSError, ValueError):
        return 0, 0.0
    return found.st_size, found.st_mtime
