"""The models of a directory or a TOML file, each with its options."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from h2o_cpp.arguments import check_int
from h2o_cpp.files.gguf_names import model_stem
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.generation.request import check_sampling
from h2o_cpp.generator import Generator
from h2o_cpp.model.chat_template import read_template
from h2o_cpp.model.truncation import check_truncation
from h2o_cpp.options import GeneratorOptions, option_names
from h2o_cpp.reply.formats import format_named
from h2o_cpp.serve.catalog import Entry
from h2o_cpp.serve.service import Defaults, Service

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_OF_SERVICE = ("template", "tool_parser", "max_queue", "max_tokens", "max_prompt")
_TABLES = {"sampling": "sampling", "chat_template_kwargs": "variables"}  # the field of Defaults
_OF_DEFAULTS = {**_TABLES, "truncation": "truncation"}


def read_models(path: Path, generator: GeneratorOptions, service: Mapping[str, Any]) -> list[Entry]:
    """The models of a directory, named after their files, or of a TOML file with a table for each.

    generator, service: defaults of the options of Generator and Service.

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
    generator: GeneratorOptions,
    service: Mapping[str, Any],
) -> Entry:
    own = dict(table)
    model = own.pop("model")
    beside = path.parent / model
    if "://" not in model and beside.exists():  # otherwise a pulled model or a Hub source
        model = str(beside)
    known = {*option_names(GeneratorOptions), *_OF_SERVICE, *_OF_DEFAULTS, "aliases"}
    for option in own:
        if option not in known:
            close = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{path}: {name}: there is no option {option!r}{hint}")
    aliases = own.pop("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(one, str) for one in aliases):
        raise ValueError(f"{path}: {name}: aliases={aliases!r}, expected a list of names")
    limits = {**service, **{key: own.pop(key) for key in _OF_SERVICE if key in own}}
    given = {_OF_DEFAULTS[name]: own.pop(name) for name in _OF_DEFAULTS if name in own}
    if given:
        limits["defaults"] = replace(limits.get("defaults", Defaults()), **given)
    for names in (("max_sequences", "memory"), ("hh", "cache_memory", "recent")):
        if own.keys() & {*names[:2]}:  # exclusive, as on the command line; recent is a part of hh
            own = dict.fromkeys(names) | own
    try:
        defaults = limits.get("defaults", Defaults())
        options = replace(generator, **own).with_policy(defaults.policy)
        if "template" in table:
            limits["template"] = read_template(limits["template"], path.parent)
        _check_limits(limits)
        if not path.is_dir() and os.path.isfile(model):  # a file of a directory may be no model
            options.slab_bytes(ModelFile.find(model))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {name}: {error}") from None
    n_bytes, changed = _size(model)
    return Entry(
        name,
        partial(_load, name, model, options, limits),
        n_bytes=n_bytes,
        aliases=aliases,
        file=model,
        template=limits.get("template"),
        spec=(model, changed, options, limits),
    )


def _check_limits(limits: Mapping[str, Any]) -> None:
    """Raises ValueError for options of Service that no model can have."""
    for name in ("max_queue", "max_tokens", "max_prompt"):
        if limits.get(name) is not None:
            check_int(name, limits[name], 1)
    defaults = limits.get("defaults", Defaults())
    for name, field in _TABLES.items():
        if not isinstance(value := getattr(defaults, field), Mapping):
            raise ValueError(f"{name}={value!r}, expected a table")
    check_sampling(defaults.sampling)
    check_truncation(defaults.truncation)
    if limits.get("tool_parser") is not None:
        format_named(limits["tool_parser"])


def _load(
    name: str, model: str, options: GeneratorOptions, limits: Mapping[str, Any], opened: ExitStack
) -> Service:
    generator = opened.enter_context(Generator(model, **vars(options)))
    return Service(generator, name=name, **limits)


def _size(model: str) -> tuple[int, float]:
    """A file's size and modification time; zeros if it is not a file."""
    try:
        found = os.stat(model)
    except (OSError, ValueError):
        return 0, 0.0
    return found.st_size, found.st_mtime
